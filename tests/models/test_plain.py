"""The models in plain torch: built from a frozen record and run, without transformers."""

from dataclasses import fields

import pytest
import torch

from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnForImageGeneration, TarnnImageConfig, TarnnSeq2SeqConfig
from tarnn.models.backbone import TextModel
from tarnn.models.config import ModelConfig
from tarnn.models.images import ImageModel, ImageModelConfig

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_a_record_keeps_what_it_was_made_from():
    attention, options = ["linear", "softmax"], {"linear": {"dropout": 0.25}}
    config = ModelConfig(**SIZES, attention=attention, attention_options=options)
    attention.append("none")
    options["linear"]["dropout"] = 0.5
    assert config.attention == ["linear", "softmax"]
    assert config.attention_options == {"linear": {"dropout": 0.25}}


@pytest.mark.parametrize("kind", [TarnnConfig, TarnnImageConfig, TarnnSeq2SeqConfig])
def test_a_config_has_the_keys_defaults_and_docs_of_its_record(kind):
    defaults = {x.name: x.default for x in fields(kind)}
    assert {x.name: x.default for x in fields(kind.record_class)}.items() <= defaults.items()
    assert kind.record_class.__doc__.splitlines()[0] in kind.__doc__
    config = kind(**SIZES)
    assert kind.from_dict(vars(config.record())).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("config", "plain", "kind"),
    [
        (TarnnConfig(**SIZES), TextModel, TarnnForCausalLM),
        (TarnnImageConfig.paper(**SIZES, image_height=2, image_width=3), ImageModel, TarnnForImageGeneration),
    ],
)
def test_a_record_builds_the_model_that_its_config_builds(config, plain, kind):
    ours, theirs = plain(config.record()), kind(config)
    shapes = [{name: x.shape for name, x in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    ours.load_state_dict(theirs.state_dict())
    ours.eval(), theirs.eval()
    token = torch.tensor([1])
    assert torch.equal(ours.step(token, ours.new_state(1))[0], theirs.step(token, theirs.new_state(1))[0])


def test_a_config_that_was_changed_builds_what_it_says_now():
    config = TarnnConfig(**SIZES)
    config.num_hidden_layers = 3
    assert len(TarnnForCausalLM(config).model.layers) == 3
    config.num_hidden_layers = 0
    with pytest.raises(ValueError, match="num_hidden_layers must be a positive integer"):
        TarnnForCausalLM(config)


def test_image_record_refuses_what_follows_from_the_image():
    with pytest.raises(ValueError, match="vocab_size of a model of images is 257, not 300; leave it out"):
        ImageModelConfig(vocab_size=300)
