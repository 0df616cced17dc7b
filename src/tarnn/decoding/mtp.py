"""Drafts by a head that a model was trained with: it expects the token after next from what the model's own head read."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tarnn.ops.softmax.cache import RowCaches
from tarnn.program.runtime import Runtime

ROOM = 512  # keys that its cache has at first
MANY = 64


class TrainedHead:
    """Expect tokens by a program of one layer, which has read each token of the text beside the hidden row before it.

    runtime: of that program. Drafts after the first come of its own hidden rows; what it read for these is read again.
    """

    def __init__(self, runtime: Runtime):
        self.runtime, self.state = runtime, runtime.new_state(1, ROOM)
        self.width = runtime.program.instructions[-1].inputs[0].size
        self._tokens: list[int] = []  # each behind the hidden row of its place
        self._hidden = torch.empty(0, self.width)

    def read(self, ids: Sequence[int]) -> None:
        """Note tokens; the first one of a text follows none."""
        self._tokens += ids if len(self._hidden) > len(self._tokens) else ids[1:]

    def passed(self, hidden: Float[Tensor, "t n"]) -> None:
        """Note the hidden rows of tokens that were read."""
        self._hidden = torch.cat([self._hidden, hidden])
        if len(self._tokens) > MANY:  # of a prompt; a few wait for the next draft
            self._take(len(self._tokens))

    def propose(self, most: int) -> list[int]:
        """Return the likeliest tokens, one behind the other."""
        if most < 1 or not self._tokens or len(self._hidden) < len(self._tokens):
            return []
        logits, row = self._take(len(self._tokens))
        drafts, before = [int(logits.argmax())], self.state
        position = before.position.clone()
        for _ in range(most - 1):
            logits, row = self._run(drafts[-1:], row[None])
            drafts.append(int(logits.argmax()))
        before.position.copy_(position)
        self.state = before
        return drafts

    def _take(self, n: int) -> tuple[Tensor, Tensor]:
        tokens, self._tokens = self._tokens[:n], self._tokens[n:]
        rows, self._hidden = self._hidden[:n], self._hidden[n:]
        return self._run(tokens, rows)

    def _run(self, tokens: list[int], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Read tokens beside hidden rows: the logits and the hidden row of the last."""
        room = int(self.state.position) + len(tokens)
        layers = [
            x.resized(2 * room) if isinstance(x, RowCaches) and x.rows[0].capacity < room else x
            for x in self.state.layers
        ]
        self.state = replace(self.state, layers=tuple(layers))
        beside = pad(rows, (self.width, 0))
        logits, hidden, self.state = self.runtime.with_hidden(torch.tensor(tokens), self.state, beside)
        return logits[0], hidden[-1]
