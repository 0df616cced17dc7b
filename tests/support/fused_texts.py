"""What tests of the fused step in `generate` share: texts by it or by `forward`, and who read which tokens."""

import pytest
import torch

from tarnn.decoding.program_step import ProgramStep
from tarnn.huggingface.fused_forward import fused_forward

LONG = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 0, "temperature": 1.5},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


@pytest.fixture
def tokens(monkeypatch):
    """How many tokens of each row the fused steps were given, call by call."""
    given = []
    for name in ("__call__", "prefill"):
        call = getattr(ProgramStep, name)

        def counted(self, ids, *args, call=call, **options):
            given.append(1 if ids.ndim == 1 else ids.shape[1])
            return call(self, ids, *args, **options)

        monkeypatch.setattr(ProgramStep, name, counted)
    return given


def generated(model, x, weights, **options):
    """A text by the fused step with these weights, or with None by `forward` alone."""
    torch.manual_seed(0)
    with fused_forward(model, weights):
        return model.generate(x, **LONG | options)
