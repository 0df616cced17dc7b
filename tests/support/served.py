"""Small checkpoints that can be served, one of each kind, and what the token loop alone makes of a request."""

import numpy as np
import torch

from support.open_folders import CONFIGS, make_folder
from tarnn.data.tokenizers import byte_tokenizer
from tarnn.decoding.draws import RowSampling, draw_rows
from tarnn.decoding.loop import TokenLoop
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.serving.pool import copy_of

TEXT = {
    "vocab_size": 257,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
TEXTS = {
    "linear": {"decay": "none"},
    "decay": {"decay": "token"},
    "endless": {"decay": "none", "eos_token_id": None},
    "rotary": {"decay": "none", "position": "rotary"},
    "log-weighted": {"decay": "none", "feature_map": "exp", "qk_norm": False},
    "short": {"position": "learned", "max_position_embeddings": 48},
    "wide": {"decay": "none", "vocab_size": 300},
    "hybrid": {"attention": ["linear", "softmax"], "position": "rotary"},
}
NO_ENDS: frozenset[int] = frozenset()


def save_served(folder, kind):
    """A model with random weights, of our own and a tokenizer whose ids are bytes, or of one of transformers' families."""
    if kind in CONFIGS:
        make_folder(folder, kind)
        return
    torch.manual_seed(0)
    TarnnForCausalLM(TarnnConfig(**TEXT | TEXTS[kind])).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


@torch.no_grad()
def alone(served, request, choice=0):
    """(tokens, the logits after the last one, the state): what `TokenLoop` makes of the request with nothing beside it."""
    begin = request.begin
    room = (0 if begin is None else len(begin.tokens)) + len(request.prompt) + request.max_tokens
    state = copy_of(begin.state, room) if begin else served.model.new_state(1, room)
    loop = TokenLoop(served.model, state, step=served.step)
    loop.logits = begin.logits if begin else None
    loop.read(torch.from_numpy(request.prompt.astype(np.int64))[None])
    row = RowSampling(1, served.step.num_outputs)
    prompt = [*(begin.tokens if begin else ()), *request.prompt]
    row.put(0, request.sampling, seed=request.sampling.seed or 0, choice=choice, prompt=prompt)

    def sample(logits):
        tokens = draw_rows(logits, row).tokens
        row.wrote(tokens)
        return tokens

    ends = served.model.end_ids if request.end_ids is None else request.end_ids
    tokens = [int(token) for token in loop.tokens(sample, request.max_tokens, end_ids=ends)]
    return tokens, loop.logits, loop.state


def prompt(length, seed=0):
    """Tokens that are whole characters."""
    return np.random.default_rng(seed).integers(32, 127, length).astype(np.int32)


def answer(stream):
    """(text, tokens, finish, snapshot) of each choice, all its events together."""
    texts, tokens, last = {}, {}, {}
    for event in stream:
        texts[event.choice] = texts.get(event.choice, "") + event.text
        tokens.setdefault(event.choice, []).extend(event.tokens)
        last[event.choice] = event
    return [(texts[i], tokens[i], last[i].finish, last[i].snapshot) for i in sorted(last)]
