"""Check whether a request can be answered: each wrong value has a sentence that says what is expected."""

import numpy as np

from tarnn.decoding.draws import check_sampling
from tarnn.ops import KVCache
from tarnn.serving.model import ServedModel
from tarnn.serving.request import Request
from tarnn.serving.snapshot import Snapshot


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
    vocab_size = len(model.step.tokens)
    if len(prompt) and not (0 <= prompt.min() and prompt.max() < vocab_size):
        wrong = next(int(x) for x in (prompt.min(), prompt.max()) if not 0 <= x < vocab_size)
        raise ValueError(f"a token must be from 0 to {vocab_size - 1}; got {wrong}.")
    if begin is not None:
        _check_begin(begin, model)
    length = len(prompt) + (0 if begin is None else len(begin.tokens))
    if limit is not None and length > limit:
        raise ValueError(
            f"this model reads {limit:,} tokens at most; the prompt has {length:,}, with what it begins from."
        )


def _check_begin(begin: Snapshot, model: ServedModel) -> None:
    model.step.check(begin.state)
    for cache in begin.state.layers:
        if isinstance(cache, KVCache) and (cache.mask is not None or cache.length != int(begin.state.position)):
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
