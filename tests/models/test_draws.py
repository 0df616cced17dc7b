"""Draws in models: saved and loaded with them, in any dtype, whatever the seeds of the process that loads."""

import torch

from tarnn.feature_maps import RandomFeatureMap
from tarnn.models import TarnnConfig, TarnnForCausalLM

OPTIONS = {"favor": {"num_features": 12, "centre": True}}


def make(**options):
    config = TarnnConfig(
        vocab_size=37,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        feature_map="favor",
        feature_map_options=OPTIONS,
        **options,
    )
    return TarnnForCausalLM(config).eval()


def draws(model):
    return [x for x in model.modules() if isinstance(x, RandomFeatureMap)]


def test_a_checkpoint_holds_its_draws(tmp_path):
    model = make()
    for phi in draws(model):
        phi.redraw()
        phi.redraw()
    for phi in (block.attention.feature_map for block in model.model.layers):
        phi.key_centre.normal_()
        phi.stretch.uniform_(0.5, 2)
    model.save_pretrained(tmp_path)
    torch.manual_seed(123)
    loaded = TarnnForCausalLM.from_pretrained(tmp_path)
    for name, x in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], x), name
    ids = torch.randint(37, (2, 9))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    for before, after in zip(draws(model), draws(loaded)):
        assert (int(after.draw), int(after.seed)) == (2, int(before.seed))
        before.redraw()
        after.redraw()
        assert torch.equal(before.omega, after.omega)


def test_the_same_config_makes_the_same_draws_whatever_torchs_seed():
    torch.manual_seed(1)
    first = make()
    torch.manual_seed(2)
    second = make()
    assert not torch.equal(first.model.layers[0].mlp.up_proj.weight, second.model.layers[0].mlp.up_proj.weight)
    for a, b in zip(draws(first), draws(second)):
        assert torch.equal(a.omega, b.omega)


def test_a_checkpoint_without_draws_is_refused_or_drawn_anew(tmp_path):
    """Weights from another map: transformers fills gaps, and then with a proper draw, not with noise or zeros."""
    plain = TarnnForCausalLM(TarnnConfig(**make().config.to_diff_dict() | {"feature_map": "elu"}))
    plain.save_pretrained(tmp_path)
    loaded = TarnnForCausalLM.from_pretrained(tmp_path, config=make().config)
    for a, b in zip(draws(make()), draws(loaded)):
        assert torch.equal(a.omega, b.omega)
        assert (int(b.seed), int(b.draw)) == (int(a.seed), 0)
    assert (loaded.model.layers[0].attention.feature_map.stretch == 1).all()
