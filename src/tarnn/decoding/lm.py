"""A language model as a folder has it: read, write, go on from a state."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tarnn.data.tokenizers import byte_backend
from tarnn.decoding.caches import copy_of
from tarnn.decoding.description import facts_of
from tarnn.decoding.drafts import token_loop
from tarnn.decoding.draws import Sampling, row_sampler
from tarnn.decoding.from_packed import tokenizer_of_packed
from tarnn.decoding.loop import PIECE, TokenLoop
from tarnn.decoding.memory import check_state
from tarnn.decoding.opened import Opened
from tarnn.decoding.opening import open_step
from tarnn.decoding.prompt import prompt_ids
from tarnn.decoding.state_file import load_state, save_state
from tarnn.decoding.streaming import KEEP, TextStream, decoder
from tarnn.decoding.tokenizer import SavedTokenizer, open_tokenizer
from tarnn.log import Log, silent
from tarnn.models.inputs import check_length
from tarnn.models.state import ModelState
from tarnn.program.tokens import check_tokens

Ids = Sequence[int] | Int[Tensor, " t"]


@dataclass(frozen=True, eq=False)
class LMState:
    """Where a text stands: a value, which nothing that it is given to changes.

    model: the state of the layers. logits: of the next token, (b, v); None before the first one. recent: the last tokens, so
    that text goes on in the middle of a character.
    """

    model: ModelState
    logits: Float[Tensor, "b v"] | None = None
    recent: tuple[int, ...] = ()

    @property
    def position(self) -> Int[Tensor, " b"]:
        """Return how many tokens each row has seen."""
        return self.model.position

    @property
    def nbytes(self) -> int:
        """Return the bytes of the layers' states."""
        return self.model.nbytes


class LM:
    """A language model that runs: of tarnn, of transformers, or converted.

        lm = tarnn.load("Qwen3.5-0.8B", weights="int8")
        for piece in lm.generate("Call me", max_new_tokens=50, seed=7): print(piece, end="")
        state = lm.read(book)                     # a value: go on from it any number of times
        print(*lm.generate("What whale?", state=state))

    opened: what `open_step` opened. tokenizer: None for ids alone.
    """

    def __init__(self, opened: Opened, tokenizer: Any = None, threads: int | None = None):
        self.opened, self.tokenizer, self.threads = opened, tokenizer, threads

    @cached_property
    def decode(self) -> Callable[[list[int]], str]:
        """The function from token ids to their text. Raises ValueError for a model without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("this model was loaded without a tokenizer, so it writes no text; load(…, tokenizer=…).")
        return decoder(self.tokenizer)

    def state(self) -> LMState:
        """Return the state before the first token."""
        return LMState(self.opened.new_state(1, 0))

    def ids(self, text: str | bytes | Ids, *, starts: bool = True) -> Int[Tensor, " t"]:
        """Return the token ids of a text, or of ids these, checked. starts: as in `prompt_ids`, which raises UserError."""
        vocab_size = self.opened.config.vocab_size
        if isinstance(text, str | bytes):
            if self.tokenizer is None:
                raise ValueError("this model was loaded without a tokenizer; give token ids, or load(…, tokenizer=…).")
            data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
            ids = torch.from_numpy(prompt_ids(self.tokenizer, data, vocab_size, starts=starts))
            self.opened.check_text(ids)
            return ids
        ids = torch.as_tensor(text, dtype=torch.int64).reshape(-1)
        if len(ids) and not (0 <= int(ids.min()) and int(ids.max()) < vocab_size):
            wrong = next(int(x) for x in (ids.min(), ids.max()) if not 0 <= x < vocab_size)
            raise ValueError(f"a token must be from 0 to {vocab_size - 1}; got {wrong}.")
        self.opened.check_text(ids)
        return ids

    @torch.no_grad()
    def read(self, text: str | bytes | Ids, state: LMState | None = None) -> LMState:
        """Return the state after a text, or ids, that follows those of `state`; None: the beginning.

        Raises ValueError beyond the model's last position, as all that reads tokens here does.
        """
        ids = self.ids(text, starts=begins(state))
        loop = self._loop(state or self.state(), len(ids))
        check_length(self.opened.config, len(ids), int(loop.state.position.max()))
        with self._threads():
            loop.read(ids[None], piece=PIECE)
        recent = (*(() if state is None else state.recent), *ids[-KEEP:].tolist())[-KEEP:]
        return LMState(loop.state, loop.logits, recent)

    @torch.no_grad()
    def step(self, ids: Int[Tensor, " b"], state: LMState) -> tuple[Float[Tensor, "b v"], LMState]:
        """Return the next token's logits after one token more in each row, and the state."""
        past = int(state.position.max())
        check_length(self.opened.config, 1, past)
        copy = copy_of(state.model, 1 + past)
        with self._threads():
            logits, after = self.opened.step(ids, copy, inplace=True)
        recent = (*state.recent, int(ids[0]))[-KEEP:] if len(ids) == 1 else ()
        return logits, LMState(after, logits, recent)

    def save(self, state: LMState, path: str | Path) -> int:
        """Write a state to a file, as `tarnn generate --state-out` does; return its size. Raises as `save_state` does."""
        if state.logits is None:
            raise ValueError("nothing was read yet, so there is no state to save; read() a text first.")
        return save_state(path, self.opened, state.model, state.logits, [*state.recent])

    def open_state(self, path: str | Path) -> LMState:
        """Read a state from a file of `save` or of `tarnn generate --state-out`. Raises as `load_state` does."""
        state, logits, recent = load_state(path, self.opened)
        return LMState(state, logits, tuple(recent))

    @torch.no_grad()
    def logits(self, ids: Int[Tensor, "b t"]) -> Float[Tensor, "b t v"]:
        """Return the logits after each token of rows of the same length, from the beginning."""
        ids, _ = check_tokens(torch.as_tensor(ids), None, self.opened.config.vocab_size)
        self.opened.check_text(ids)
        check_length(self.opened.config, ids.shape[1])
        state = self.opened.new_state(*ids.shape)
        if self.opened.weights is None:  # a step in plain PyTorch, which gives the last ones alone
            steps = []
            for token in ids.unbind(1):
                logits, state = self.opened.step(token, state, inplace=True)
                steps.append(logits)
            return torch.stack(steps, 1)
        with self._threads():
            return self.opened.prefill(ids, state, inplace=True, every=True)[0]

    def generate(
        self,
        prompt: str | bytes | Ids = "",
        *,
        max_new_tokens: int = 256,
        state: LMState | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        draft: int = 0,
        **sampling: Any,
    ) -> "Writing":
        """Continue a prompt, after those tokens that `state` has read: an iterator of pieces of text, as they are made.

        stop: strings that end it and are not shown. seed: the same seed, the same text, here, by `tarnn generate` and by a
        server; None: another one each time. sampling: temperature (0: the most likely token), top_k, top_p, min_p and penalties
        (see `Sampling`); by default as the folder's generation_config.json says, or else from the model's own distribution.
        draft: at most so many expected tokens are read along with each one (0 to 11): where they are right, several come of one
        pass. The text is the same, with any seed.

        Raises ValueError for values out of range, and for an empty prompt where nothing was read before.
        """
        return Writing(self, prompt, state, max_new_tokens, stop, self.sampling(**sampling), seed, draft)

    def info(self, lengths: Sequence[int] = ()) -> dict[str, Any]:
        """Return facts about it, as `facts_of` says: size, layers, bytes of states."""
        return facts_of(self.opened, lengths)

    def sampling(self, **options: Any) -> Sampling:
        """Return how it draws: these options, and for others what the folder says."""
        return Sampling(**{**self.opened.sampling, **{k: x for k, x in options.items() if x is not None}})

    def _loop(self, state: LMState, num_tokens: int, draft: int = 0) -> TokenLoop:
        """A loop that goes on with a copy of a state, with room for so many tokens."""
        opened = self.opened
        room = num_tokens + int(state.position.max())
        check_state(opened, 1, room)
        copy = copy_of(state.model, room)
        return token_loop(opened, copy, state.logits, draft=draft)

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Within: so many threads as were requested."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def begins(state: LMState | None) -> bool:
    """Return whether no token came before: a state may be another one than nothing, and yet the first."""
    return state is None or not bool(state.position.any())


class Writing:
    """A text that is being written: an iterator of its pieces.

    ids: the tokens so far. state: where it stands, for going on. loop: what makes them; with drafts it counts these. finish: ""
    until it has ended, then why.
    """

    def __init__(
        self,
        lm: LM,
        prompt: str | bytes | Ids,
        state: LMState | None,
        max_new_tokens: int,
        stop: Sequence[str],
        sampling: Sampling,
        seed: int | None,
        draft: int = 0,
    ):
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be 0 or more; got {max_new_tokens}.")
        opened, ids = lm.opened, lm.ids(prompt, starts=begins(state))
        before = lm.state() if state is None else state
        check_length(opened.config, len(ids), int(before.position.max()))
        seed = secrets.randbits(63) if seed is None else seed
        prompt_ids = [*before.recent, *ids.tolist()]
        draw = row_sampler(sampling, opened.config.vocab_size, seed=seed, prompt=prompt_ids)
        self._lm, self.ids, self._ends = lm, list[int](), opened.end_ids
        self._context = prompt_ids[-2 * KEEP :]
        self._text = TextStream(lm.decode, self._context, stop)
        self.loop = lm._loop(before, len(ids) + max_new_tokens, draft)
        with lm._threads():
            self.loop.read(ids[None])
        self._tokens = self.loop.tokens(draw, max_new_tokens, end_ids=opened.end_ids, pad_id=opened.pad_id)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._text.over:
            with self._lm._threads():
                token = next(self._tokens, None)
            if token is None:
                self._text.finish("max_new_tokens reached")
            else:
                self.ids.append(int(token))
                self._text.push(int(token), self._ends)
            if piece := self._text.take():
                return piece
        raise StopIteration

    @property
    def finish(self) -> str:
        return self._text.over

    @property
    def state(self) -> LMState:
        recent = tuple([*self._context, *self.ids][-KEEP:])
        return LMState(copy_of(self.loop.state), self.loop.logits, recent)


def load(
    source: str | Path | nn.Module,
    weights: str | None = None,
    *,
    threads: int | None = None,
    tokenizer: Any = None,
    report: Log = silent,
    **opening: Any,
) -> LM:
    """Open a language model to run it: a folder in Hugging Face's layout, a packed file, or a model that lives already.

        lm = tarnn.load("Qwen3.5-0.8B", weights="int8")

    weights: how its step keeps them: float32 | bfloat16 | int8 | int4; None: as they were saved. threads: None: torch's number.
    tokenizer: of a live model; a folder has its own. report: called with lines on what the folder has and the model does not use.
    opening: more arguments of `open_step`.

    Raises UserError, a ValueError, for a folder that holds no such model, with the reason, and Refusal, another, where weights
    are given and there is no step for them.
    """
    opened = open_step(source, weights, report=report, **opening)
    if tokenizer is None and not isinstance(source, nn.Module):
        tokenizer = tokenizer_in(Path(source), opened.config.vocab_size)
    return LM(opened, tokenizer, threads)


def tokenizer_in(folder: Path, vocab_size: int) -> Any:
    """Open the tokenizer of a folder or a packed file; one without, for 256 tokens, is of bytes. Raises UserError where there is
    none."""
    if folder.is_file():
        return tokenizer_of_packed(folder, vocab_size)
    if vocab_size == 256 and not (folder / "tokenizer.json").is_file():
        return SavedTokenizer(byte_backend(), None, None)
    return open_tokenizer(folder)
