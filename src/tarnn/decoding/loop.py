"""The token loop: a prompt in pieces, then one token after another, with nothing that grows.

Beside `model.generate`, which can do more (beams, processors, batches of prompts of several lengths), this
loop does one thing with less around it. Both make the same tokens from the same seed.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tarnn.decoding.samplers import Sampler
from tarnn.models.inputs import check_length
from tarnn.models.state import ModelState

# (token_ids (b,), state, *, inplace) → (logits or parameters, state)
Step = Callable[..., tuple[Tensor, Any]]
PIECE = 1024  # tokens of a prompt read at once: memory is that of one piece, however long the prompt


def prefill_of(step: Step, model: Any) -> Step:
    """Return the function that reads many tokens at once, (b, t): a fused step's `prefill`, or else `model.prefill`."""
    return getattr(step, "prefill", model.prefill)


class TokenLoop:
    """A model, as `open_step` opens it or a `TextModel`, its state and the logits of the token that comes next.

        loop = TokenLoop(model, model.new_state(1, capacity=prompt_ids.shape[1] + 100))
        loop.read(prompt_ids)                                   # (b, t)
        for token in loop.tokens(sampler(), 100): ...           # (b,) each

    The state's capacity bounds the caches of softmax layers: all tokens, read and made; other layers ignore
    it. `state` and `logits` (of the next token; None before anything was read) have always seen every token
    that was read or given out, so they can be saved, forked or read on at any time. The loop writes its state in
    place, so it begins with a copy of the given one, unless that is `owned`; clone what you want to keep. `step` has the
    signature of `model.step`, which it is by default; `tarnn.decoding.fastest_step` gives a faster one. A step with a
    `prefill` reads the prompt too, so that it and what follows are computed alike. All of it runs without autograd.
    """

    def __init__(
        self,
        model: Any,
        state: ModelState,
        logits: Float[Tensor, "b v"] | None = None,
        *,
        step: Step | None = None,
        owned: bool = False,
    ):
        self.model, self._state, self.logits = model, state if owned else state.clone(), logits
        self.step: Step = model.step if step is None else step

    @property
    def state(self) -> ModelState:
        return self._state

    @torch.no_grad()
    def read(self, ids: Int[Tensor, "b t"], *, piece: int = PIECE) -> None:
        """Reads tokens, `piece` at a time: O(t) time, memory of one piece. No tokens: nothing happens."""
        prefill = prefill_of(self.step, self.model)
        for part in ids.split(piece, dim=1):
            if part.shape[1]:
                self.logits, self._state = prefill(part, self.state, inplace=True)

    def fork(self, copies: int) -> None:
        """`copies` rows that go on separately from a single one: a prompt is read once for many samples.

        Raises ValueError where there are several rows already.
        """
        if len(self.state.position) != 1:
            raise ValueError(f"only a single sequence can be forked; this state has {len(self.state.position)} rows.")
        index = torch.zeros(copies, dtype=torch.long, device=self.state.position.device)
        self._state = self.state.select(index)
        self.logits = None if self.logits is None else self.logits[index]

    @torch.no_grad()
    def tokens(
        self, sample: Sampler, max_new_tokens: int, *, end_ids: Collection[int] = (), pad_id: int = 0
    ) -> Iterator[Int[Tensor, " b"]]:
        """Up to max_new_tokens times one token per row, as it is made. Stop by leaving the loop.

        A row ends with the first of `end_ids` that it draws (given out like any token); then it gets `pad_id`
        until all have ended. Raises ValueError before anything was read: there is nothing to continue.
        """
        if self.logits is None:
            raise ValueError("nothing was read yet, so there is no next token. read() a prompt, or a separator, first.")
        ends = torch.tensor(sorted(end_ids), dtype=torch.long, device=self.logits.device)
        ended = torch.zeros(self.logits.shape[0], dtype=torch.bool, device=self.logits.device)
        limit = self.model.config.max_position_embeddings
        past = 0 if limit is None else int(self.state.position.max())
        for count in range(max_new_tokens):
            check_length(self.model.config, count + 1, past)
            token = sample(self.logits).masked_fill(ended, pad_id)
            left = max_new_tokens - count - 1
            self._advance(token, left if limit is None else min(left, limit - past - count - 1))
            yield token
            if len(ends):
                ended |= torch.isin(token, ends)
                if ended.all():
                    return

    def _advance(self, token: Int[Tensor, " b"], left: int) -> None:
        """Read a token of each row. left: how many may follow it."""
        self.logits, self._state = self.step(token, self.state, inplace=True)
