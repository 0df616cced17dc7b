"""What is asked of the engine, and what it answers: records without behaviour."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from tarnn.serving.snapshot import Snapshot

NONE: Int[np.ndarray, " t"] = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from the logits. The defaults draw from the model's own distribution; temperature 0 is greedy.

    top_k 0, top_p 1, min_p 0, the penalties and an empty logit_bias are off. Penalties look at what the answer has written so far
    (repetition_penalty, as in `samplers.penalize_repetition`, at the prompt too): frequency_penalty is taken from a logit once
    for each time that its token was written, presence_penalty once. logit_bias: added to the logits of tokens, by their ids.
    seed: of the draws; None: another one each time.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True, eq=False)
class Request:
    """A text to continue: the tokens of its prompt, and how.

    prompt: token ids (t,), int32; behind those of `begin`, the place from which it goes on, if there is one.
    max_tokens: how many are written at most, of each of n choices, which begin with the same prompt.
    stop: strings that end an answer and are not part of it. end_ids None: the model's own; they end it too.
    logprobs: of how many of the likeliest tokens the logarithms are told, beside that of the token itself; None: of none.
    boundaries: places in begin and prompt together, in tokens, whose states are worth keeping: the ends of messages.
    keep: whether the state at the answer's end is wanted: it is in the last event of each choice.
    tenant: whose states are looked at and kept; client: who has a fair share of the machine with others.
    """

    prompt: Int[np.ndarray, " t"] = field(default_factory=lambda: NONE)
    max_tokens: int = 256
    sampling: Sampling = Sampling()
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
    """What one choice has written since its last event.

    text: whole characters, and nothing of a stop string. tokens: those behind it. finish: "" while it goes on; "stop" at an
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
