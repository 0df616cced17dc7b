"""Models as a store sees them, and snapshots of them with states that no other snapshot has."""

import zlib

import numpy as np
import torch

from support.step_models import TEXT
from tarnn.decoding.state_file import fingerprint
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.serving.model import ServedModel, StateKey
from tarnn.serving.snapshot import Snapshot

KINDS = {
    "linear": {},
    "decay": {"decay": "head", "feature_map": "exp"},
    "hybrid": {"attention": ["linear", "softmax", "none"], "position": "rotary"},
    "convolved": {"conv_kernel": 5},
}


class Outputs:
    """A step that is never run: all that a store asks of it is how many logits there are."""

    num_outputs = TEXT["vocab_size"]


def served(kind: str = "linear", **key) -> ServedModel:
    torch.manual_seed(0)
    model = TarnnForCausalLM(TarnnConfig(**TEXT | KINDS[kind])).eval()
    return ServedModel("m", model, Outputs(), StateKey(fingerprint(model), "float32", "avx2")._replace(**key))


def snapshot_after(served: ServedModel, tokens) -> Snapshot:
    """What the model's own prefill gives: the same tokens, the same bits."""
    ids = torch.tensor([list(tokens)])
    logits, state = served.model.prefill(ids, served.model.new_state(1, capacity=ids.shape[1] + 3))
    return Snapshot(state, logits, np.array(tokens, np.int32))


def snapshot_of(served: ServedModel, tokens) -> Snapshot:
    """A state that no other tokens have, made up: of the model's shapes, in less time than the model needs."""
    random = torch.Generator().manual_seed(zlib.crc32(np.array(tokens, np.int32).tobytes()))
    empty = served.model.new_state(1, 0)
    state = empty.map(lambda x: torch.randn(x.shape, generator=random) if x.is_floating_point() else x + len(tokens))
    return Snapshot(state, torch.randn(1, served.step.num_outputs, generator=random), np.array(tokens, np.int32))


def same(a: Snapshot, b: Snapshot) -> bool:
    """To the last bit; NaNs are what they are."""
    ours, theirs = ({**x.state.tensors(), "logits": x.logits} for x in (a, b))
    bits = (torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in ours)
    return ours.keys() == theirs.keys() and all(bits) and a.tokens.tolist() == b.tokens.tolist()
