"""Training a converted model: what is trained, that it helps, and that it goes on where it was stopped."""

import copy
import math

import pytest
import torch
from support.families import FAMILIES, model_of

from tarnn.conversion import convert, finetune, set_options
from tarnn.conversion.calibration import Near
from tarnn.conversion.distil import MapLosses

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def texts():
    torch.manual_seed(1)
    return torch.randint(3, 99, (6, 40))


@pytest.fixture
def model(texts):
    made = model_of(FAMILIES["Llama"])
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if "q_proj" in key or "k_proj" in key:
                parameter.mul_(8)
    convert(made, texts, window=6, sinks=2, feature_map="hedgehog")
    return made


def weights_of(model):
    return {name: x.clone() for name, x in model.named_parameters()}


def test_stage_1_trains_maps_and_far_bias_alone(model, texts):
    set_options(model, mode="features")
    before, loss = weights_of(model), MapLosses(model, Near(6, 2))
    first = loss(texts)["loss"].item()
    finetune(model, texts, steps=30)
    assert loss(texts)["loss"].item() < first
    after = weights_of(model)
    assert all(torch.equal(x, after[name]) for name, x in before.items() if ".tarnn." not in name)
    assert not torch.equal(
        before["model.layers.0.self_attn.tarnn.far_bias"], after["model.layers.0.self_attn.tarnn.far_bias"]
    )


def test_stage_1_matches_what_a_map_can_match(model, texts):
    """With features that are exact the loss is 0: here, where all far keys weigh the same."""
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "k_proj" in name:
                x.zero_()
    # φ(0) is 1/m everywhere, m = 8, and φ(q) sums to 2: φ(q)·φ(0) = 1/4, where e^0 is right
    set_options(model, mode="features", far_bias=math.log(4))
    assert MapLosses(model, Near(6, 2))(texts)["loss"].item() < 1e-4


@pytest.mark.parametrize("train", ["lora", "weights"])
def test_stage_2_comes_closer_to_softmax(model, texts, train):
    if train == "lora":
        pytest.importorskip("peft")
    before = weights_of(model)
    report = finetune(
        model, texts, train=train, steps=12, learning_rate=3e-3, batch_size=2, drop_window=train == "weights"
    )
    after = weights_of(model)
    assert set(after) == set(before)
    assert not torch.equal(
        before["model.layers.0.self_attn.q_proj.weight"], after["model.layers.0.self_attn.q_proj.weight"]
    )
    assert report.unit == "nats per token"


def test_a_stopped_training_goes_on(model, texts, tmp_path):
    whole = copy.deepcopy(model)
    finetune(whole, texts, steps=10, out=tmp_path / "whole")
    assert (tmp_path / "whole" / "checkpoints" / "checkpoint-10").is_dir()
    loss = weights_of(whole)
    finetune(model, texts, steps=10, out=tmp_path / "whole", resume=True)  # nothing is left to do
    for name, x in weights_of(model).items():
        assert torch.allclose(x, loss[name], atol=1e-6), name


def test_refused(texts):
    with pytest.raises(ValueError, match="convert"):
        finetune(model_of(FAMILIES["Llama"]), texts)
