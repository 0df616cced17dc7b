"""Redrawing and calibrating in training: which draw belongs to which step, whatever was interrupted."""

from types import SimpleNamespace

import pytest
import torch

from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.training.callbacks import Redraw, random_maps


def model(**options):
    config = TarnnConfig(
        vocab_size=37,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        feature_map="favor",
        feature_map_options={"favor": {"num_features": 8, **options}},
        dropout=0.1,
    )
    torch.manual_seed(0)
    return TarnnForCausalLM(config)


def step(callback, model, number):
    callback.on_step_begin(None, SimpleNamespace(global_step=number), None, model=model)


def omegas(model):
    return [x.omega.clone() for x in random_maps(model)]


def test_a_draw_belongs_to_the_steps_from_its_number_times_every_on():
    callback, run = Redraw(3), model()
    fresh = omegas(run)
    seen = []
    for number in range(8):
        step(callback, run, number)
        seen.append([int(x.draw) for x in random_maps(run)])
    assert seen == [[n // 3] * 2 for n in range(8)]
    assert not any(torch.allclose(a, b) for a, b in zip(fresh, omegas(run)))


@pytest.mark.parametrize("last", [3, 4, 6])
def test_a_resumed_run_sees_the_draws_of_one_that_was_not_interrupted(last):
    """Whether the checkpoint was saved right before a new draw or in between."""
    whole = model()
    for number in range(8):
        step(Redraw(3), whole, number)
        if number == last - 1:
            saved = {name: x.clone() for name, x in whole.state_dict().items()}
    torch.manual_seed(99)
    resumed = model(seed=5)  # what is saved counts, not what it was made with
    resumed.load_state_dict(saved)
    for number in range(last, 8):
        step(Redraw(3), resumed, number)
    assert all(torch.equal(a, b) for a, b in zip(omegas(whole), omegas(resumed)))


def test_never_is_never():
    run = model()
    before = omegas(run)
    for number in range(4):
        step(Redraw(0), run, number)
    assert all(torch.equal(a, b) for a, b in zip(before, omegas(run)))


def test_processes_agree_and_their_random_states_stay():
    first, second = model(), model()
    torch.manual_seed(1)
    step(Redraw(2), first, 2)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(2)
    step(Redraw(2), second, 2)
    assert all(torch.equal(a, b) for a, b in zip(omegas(first), omegas(second)))


def test_calibrates_with_every_draw_and_leaves_the_mode_alone():
    run = model(centre=True, balance=True).train()
    ids = torch.randint(37, (2, 30))
    forward = lambda model: model(ids)  # noqa: E731
    centres = lambda: [layer.attention.feature_map.key_centre.clone() for layer in run.model.layers]  # noqa: E731
    step(Redraw(3, forward), run, 1)
    assert all((x == 0).all() for x in centres())  # not its step
    step(Redraw(3, forward), run, 0)
    first = centres()
    assert all((x != 0).all() for x in first)
    assert run.training
    step(Redraw(3, forward), run, 3)  # the same weights and no dropout: the first layer's are the same
    assert torch.equal(first[0], centres()[0])
    assert not torch.equal(first[1], centres()[1])  # another draw in the first layer


def test_a_learned_omega_is_left_alone():
    model = TarnnForCausalLM(
        TarnnConfig(vocab_size=8, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, feature_map="favor")
    )
    (phi,) = random_maps(model)
    phi.omega = torch.nn.Parameter(phi.omega.clone())
    before = phi.omega.detach().clone()
    assert random_maps(model) == []
    Redraw(1).on_step_begin(None, SimpleNamespace(global_step=5), None, model=model)
    assert torch.equal(phi.omega, before)


def test_maps_that_are_not_random_are_no_business_of_it():
    plain = TarnnForCausalLM(TarnnConfig(vocab_size=37, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    step(Redraw(1, lambda model: pytest.fail("nothing to calibrate")), plain, 3)


def test_every_must_be_a_number_of_steps():
    with pytest.raises(ValueError, match="every ≥ 0 steps, 0 for never; got -1"):
        Redraw(-1)
