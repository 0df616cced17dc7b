"""Requests to the engine, with their checks, and the events that answer them."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from tarnn.decoding.caches import caches_of
from tarnn.decoding.draws import Sampling, check_sampling
from tarnn.serving.model import ServedModel
from tarnn.serving.snapshot import Snapshot

NONE: Int[np.ndarray, " t"] = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class Request:
    """A text to continue: the tokens of its prompt, and how.

    prompt: token ids (t,), int32; after those of `begin`, the place from which it goes on, if there is one.
    max_tokens: how many are written at most, of each of n choices, which begin with the same prompt.
    stop: strings that end an answer and are not part of it. end_ids None: the model's own; they end it too.
    logprobs: of how many of the likeliest tokens the logarithms are told, beside that of the token itself; None: of none.
    boundaries: places in begin and prompt together, in tokens, whose states are worth keeping: the ends of messages.
    keep: whether the state at the answer's end is wanted: it is in the last event of each choice.
    tenant: whose states are looked at and kept; client: who has a fair share of the machine with others.
    """

    prompt: Int[np.ndarray, " t"] = field(default_factory=lambda: NONE)
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    begin: Snapshot | None = None
    stop: tuple[str, ...] = ()
    end_ids: frozenset[int] | None = None
    logprobs: int | None = None
    boundaries: tuple[int, ...] = ()
    keep: bool = False
    tenant: str = ""
    client: str = ""


class TokenLogprob(NamedTuple):
    """The natural logarithm of a token's probability at temperature 1, without penalties; and those of the likeliest."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """New tokens and text of one choice.

    text: whole characters, and nothing of a stop string. tokens: those that make it. finish: "" while it goes on; "stop" at an
    end token or a stop string, "length" at max_tokens or the model's last position, "cancelled", or "error" with its reason in
    `error`. snapshot: where the choice ended, if the request asked to keep it.
    """

    choice: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str = ""
    snapshot: Snapshot | None = None
    error: str = ""


class Usage(NamedTuple):
    """Tokens of the prompt with what it began from, how many of those were not read again, and tokens written by all choices."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def check_request(request: Request, model: ServedModel) -> None:
    """Raise ValueError for a request that this model can't answer."""
    _check_prompt(request, model)
    _check_counts(request, model)
    check_sampling(request.sampling, model.step.num_outputs)
    if (seed := request.sampling.seed) is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"a seed has 64 bits: from −2^63 to 2^64 − 1; got {seed}.")
    if "" in request.stop:
        raise ValueError("a stop string must have at least one character; got an empty one.")


def _check_prompt(request: Request, model: ServedModel) -> None:
    prompt, begin, limit = request.prompt, request.begin, model.model.config.max_position_embeddings
    if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(f"a prompt is token ids (t,), whole numbers; got {prompt.shape} of {prompt.dtype}.")
    if not len(prompt) and begin is None:
        raise ValueError("the prompt is empty, so there is nothing to continue. Give a token at least.")
    vocab_size = model.model.config.vocab_size
    if len(prompt) and not (0 <= prompt.min() and prompt.max() < vocab_size):
        wrong = next(int(x) for x in (prompt.min(), prompt.max()) if not 0 <= x < vocab_size)
        raise ValueError(f"a token must be from 0 to {vocab_size - 1}; got {wrong}.")
    model.model.check_text(prompt)
    if begin is not None:
        _check_begin(begin, model)
    length = len(prompt) + (0 if begin is None else len(begin.tokens))
    if limit is not None and length > limit:
        raise ValueError(
            f"this model reads {limit:,} tokens at most; the prompt has {length:,}, with what it begins from."
        )


def _check_begin(begin: Snapshot, model: ServedModel) -> None:
    model.step.check(begin.state)
    for cache in (x for layer in begin.state.layers for x in caches_of(layer)):
        if cache.mask is not None or cache.length != int(begin.state.position):
            raise ValueError(
                f"a state to go on from has a key for each of its tokens and no padding; got {cache.length} keys at position "
                f"{int(begin.state.position)}{'' if cache.mask is None else ', and a mask'}. Read its text again, alone."
            )
    if begin.logits.shape != (1, model.step.num_outputs):
        expected, shape = f"(1, {model.step.num_outputs})", tuple(begin.logits.shape)
        raise ValueError(f"the state is of another model: its logits are {expected} of this one; got {shape}.")


def _check_counts(request: Request, model: ServedModel) -> None:
    if request.n < 1:
        raise ValueError(f"n must be at least 1; got {request.n}.")
    if request.max_tokens < 0:
        raise ValueError(f"max_tokens must be 0 or more; got {request.max_tokens}.")
    vocab_size = model.step.num_outputs
    if request.logprobs is not None and not 0 <= request.logprobs <= vocab_size:
        raise ValueError(f"logprobs must be from 0 to {vocab_size}, the vocabulary; got {request.logprobs}.")
