"""Logarithms of a prompt's own tokens, for `echo` with `logprobs`: how likely each was after those before it."""

import asyncio
from math import nan

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.serving.caches import copy_of
from tarnn.serving.http.prompts import Ids
from tarnn.serving.model import ServedModel
from tarnn.serving.pool import new_state
from tarnn.serving.request import TokenLogprob
from tarnn.serving.snapshot import Snapshot

NUMBERS = 2**21  # that a piece of a prompt takes, tokens x vocabulary


async def score(model: ServedModel, ids: Ids, begin: Snapshot | None, likeliest: int) -> list[TokenLogprob]:
    """Of each token; of the first one NaN, where nothing stands before it. likeliest: of how many others, at each place."""
    room = len(ids) + (0 if begin is None else len(begin.tokens))
    state = new_state(model, 1, capacity=room) if begin is None else copy_of(begin.state, room)
    before = None if begin is None else begin.logits
    scores: list[TokenLogprob] = []
    piece = max(1, NUMBERS // model.step.num_outputs)

    def read(part: Ids) -> Float[Tensor, "t v"]:
        nonlocal state
        with torch.no_grad():
            tokens = torch.from_numpy(part).long()[None]
            logits, state = model.step.prefill(tokens, state, inplace=True, every=True)
            return logits[0]

    for place in range(0, len(ids), piece):
        part = ids[place : place + piece]
        logits = await asyncio.to_thread(read, part)  # between two pieces a client who is gone is seen
        if before is None:
            scores.append(TokenLogprob(int(ids[0]), nan))
            rows, tokens = logits[:-1], part[1:]
        else:
            rows, tokens = torch.cat((before, logits[:-1])), part
        before = logits[-1:]
        scores += scored(rows, tokens, likeliest)
    return scores


def scored(logits: Float[Tensor, "t v"], tokens: Ids, likeliest: int) -> list[TokenLogprob]:
    logs = logits.double().log_softmax(-1)
    own = logs.gather(-1, torch.from_numpy(tokens).long()[:, None])[:, 0].float().tolist()
    top = logs.topk(min(likeliest, logs.shape[-1]))
    rows = zip(tokens.tolist(), own, top.indices.tolist(), top.values.float().tolist())
    return [TokenLogprob(token, value, tuple(zip(ids, values))) for token, value, ids, values in rows]
