"""Packed rows have the loss and the gradients of their examples alone, in every family that is trained, checkpointed or not."""

import pytest
import torch
from support.open_folders import EVERY
from support.tuning_examples import example

from tarnn.conversion.opening import open_pretrained, patch
from tarnn.huggingface.wide import widen
from tarnn.log import silent
from tarnn.tuning.adapter import with_adapters
from tarnn.tuning.task import TuneTask

pytestmark = pytest.mark.filterwarnings("ignore")
OFTEN = (
    "Qwen3.5",
    "Llama",
    "LFM2",
    "Mamba",
    "Mamba-2",
    "Kimi-Linear-48B-A3B",
    "MiniMax-Text-01",
    "xLSTM-7b",
    "Zamba2-1.2B",
)
FAMILIES = [pytest.param(x, marks=() if x in OFTEN else pytest.mark.slow) for x in EVERY]


def adapted(folder, dtype):
    """A model with adapters that change what it computes."""
    base = model = open_pretrained(folder, text_only=True)
    model.set_experts_implementation("eager")  # which computes in float64, too
    patch(model, silent)
    torch.manual_seed(0)
    model = with_adapters(model, 3, 6, "base")
    widen(model, base)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_B" in name:
                x.normal_(std=0.1)
    return model.to(dtype).train()


def gradients(model, task, checkpointing=False):
    if checkpointing:
        model.activation_checkpointing_enable()
    for row in task.examples:
        batch = task.collate([row])
        with task.within_step(batch):
            model(**batch, num_items_in_batch=torch.tensor(float(task.num_learned)))["loss"].backward()
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return found


def far(ours, theirs):
    """The largest difference of any adapter's gradient, as a part of that gradient."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - x).abs().max() / x.abs().max()) for name, x in theirs.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone(folder_of, family):
    """In float64 they are equal, but for norms that are computed in float32.

    In float32 packed rows are as near to these gradients as examples alone are. A leak is of the size of the gradient. float32's
    rounding is not small either: where weights are large it grows from layer to layer, in transformers' own functions too.
    """
    examples = [example(n, 1) for n in (7, 12, 5)]
    packed, alone = (TuneTask(examples, [], 24, pack) for pack in (True, False))
    assert len(packed.examples) == 1
    model = adapted(folder_of(family), torch.float64)
    exact = gradients(model, alone)
    assert exact.keys() == {x for x, p in model.named_parameters() if p.requires_grad}
    assert far(gradients(model, packed), exact) < 1e-6
    assert far(gradients(model, packed, checkpointing=True), exact) < 1e-6
    model = adapted(folder_of(family), torch.float32)
    rounding = far(gradients(model, alone), exact)
    assert rounding < 1e-3
    assert far(gradients(model, packed), exact) < 2 * rounding + 1e-6
    assert far(gradients(model, packed, checkpointing=True), exact) < 2 * rounding + 1e-6
    model.eval()
    sums = [sum(task.outcome(model, task.collate([row]))[0] for row in task.examples) for task in (packed, alone)]
    assert torch.allclose(*sums, rtol=1e-5)
