"""Packed rows have the loss and the gradients of their examples alone, in every family that is trained, checkpointed or not."""

import pytest
import torch
from support.open_folders import CONFIGS
from support.tuning_examples import example

from tarnn.conversion.opening import open_pretrained, patch
from tarnn.log import silent
from tarnn.tuning.adapter import with_adapters
from tarnn.tuning.task import TuneTask

pytestmark = pytest.mark.filterwarnings("ignore")
OFTEN = ("Qwen3.5", "Mamba", "Llama")
FAMILIES = [pytest.param(x, marks=() if x in OFTEN else pytest.mark.slow) for x in CONFIGS]


def gradients(model, task, checkpointing):
    if checkpointing:
        model.activation_checkpointing_enable()
    model.train()
    total = sum(task.num_learned for task in [task])
    for row in task.examples:
        batch = task.collate([row])
        with task.within_step(batch):
            model(**batch, num_items_in_batch=torch.tensor(float(total)))["loss"].backward()
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone(folder_of, family, checkpointing):
    model = open_pretrained(folder_of(family), text_only=True)
    patch(model, silent)
    model = with_adapters(model, 3, 6, "base")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_B" in name:
                x.normal_(std=0.1)
    examples = [example(n, 1) for n in (7, 12, 5)]
    packed, alone = (TuneTask(examples, [], 24, pack) for pack in (True, False))
    assert len(packed.examples) == 1
    ours, theirs = gradients(model, packed, checkpointing), gradients(model, alone, False)
    assert ours.keys() == theirs.keys() == {x for x, p in model.named_parameters() if p.requires_grad}
    for name, x in theirs.items():
        assert (ours[name] - x).abs().max() <= 3e-4 * x.abs().max(), name  # a leak is of the size of the gradient
    model.eval()
    sums = [sum(task.outcome(model, task.collate([row]))[0] for row in task.examples) for task in (packed, alone)]
    assert torch.allclose(*sums, rtol=1e-5)
