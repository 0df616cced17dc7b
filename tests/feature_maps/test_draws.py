"""Directions: orthogonal, uniform, of the right norms; the same from the same seed, saved, and redrawn on request."""

import pytest
import torch

from tarnn.feature_maps import PositiveRandomFeatures, draws
from tarnn.feature_maps.draws import DIRECTIONS, draw_omega

STRUCTURED = ("orthogonal", "hadamard", "givens")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("norms", ["chi", "fixed"])
@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize(("num", "dim"), [(1, 1), (3, 8), (8, 8), (21, 8), (5, 1), (7, 2)])
def test_any_number_of_any_width(directions, norms, num, dim):
    omega = draw_omega(num, dim, directions=directions, norms=norms, generator=generator())
    assert omega.shape == (num, dim)
    assert omega.dtype == torch.float64
    assert omega.isfinite().all()
    if norms == "fixed":
        assert torch.allclose(omega.norm(dim=-1), torch.tensor(dim**0.5, dtype=torch.float64))


@pytest.mark.parametrize("directions", STRUCTURED)
@pytest.mark.parametrize("dim", [2, 8, 64])
def test_blocks_are_orthogonal_and_differ(directions, dim):
    omega = draw_omega(2 * dim + dim // 2, dim, directions=directions, generator=generator())
    for block in omega.split(dim):
        gram = block @ block.T
        off = gram - gram.diag().diag()
        assert off.abs().max() < 1e-12 * gram.diag().max()
    assert not torch.allclose(omega[:dim], omega[dim : 2 * dim])


@pytest.mark.parametrize("directions", DIRECTIONS)
def test_rows_are_standard_normal(directions):
    """Mean 0, covariance I, and fourth moment 3 of a projection: a Gaussian's, within 4 standard errors."""
    dim, num = 4, 40_000
    omega = draw_omega(num, dim, directions=directions, generator=generator())
    assert omega.mean(0).abs().max() < 4 * num**-0.5
    assert (omega.T @ omega / num - torch.eye(dim)).abs().max() < 4 * (2 / num) ** 0.5
    direction = torch.tensor([0.5, -0.5, 0.1, 0.7], dtype=torch.float64)
    projected = omega @ (direction / direction.norm())
    if directions != "hadamard":  # whose projections take a few values only at d = 4: its small bias
        assert (projected**4).mean().item() == pytest.approx(3, abs=4 * (96 / num) ** 0.5)
    assert omega.norm(dim=-1).square().var().item() == pytest.approx(2 * dim, rel=0.1)  # chi², fresh


@pytest.mark.parametrize("directions", STRUCTURED)
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_directions_do_not_lean_to_the_axes(directions, dim):
    """Σ_i u_i⁴ of a uniform direction is 3/(d + 2) on average; with 2⌈log₂ d⌉ rounds of rotations it's up to 70 % more,
    and so along an axis exp(x·y) is overestimated by a tenth and more."""
    unit = draw_omega(2048, dim, directions=directions, norms="fixed", generator=generator()) * dim**-0.5
    assert (unit**4).sum(-1).mean().item() == pytest.approx(3 / (dim + 2), rel=0.05)


def test_norms_do_not_depend_on_directions():
    """Norms of the block that was orthogonalised would: its first row keeps its direction, the last one doesn't."""
    omega = draw_omega(40_000, 4, generator=generator()).unflatten(0, (-1, 4))  # (blocks, 4, 4)
    assert omega.norm(dim=-1).mean(0) == pytest.approx(torch.full((4,), 1.8800), abs=0.03)  # mean of chi_4
    norms, first = omega.norm(dim=-1), omega[..., 0].abs() / omega.norm(dim=-1)
    correlation = torch.corrcoef(torch.stack([norms.flatten(), first.flatten()]))[0, 1]
    assert correlation.abs() < 0.02


def test_the_sign_of_qr_is_corrected(monkeypatch):
    """E φ(x)·φ(x)/exp(x·x) at d = 4: 1.00, and 1.48 with the signs of LAPACK's QR, as public code has them."""
    x = torch.tensor([-0.35, -0.35, -0.35, 0.35], dtype=torch.float64)

    def ratio():
        phi = PositiveRandomFeatures(4, 200_000, scale=1.0, seed=0).double()
        return (phi(x).square().sum() / (x @ x).exp()).item()

    assert ratio() == pytest.approx(1, abs=0.02)

    def raw_qr(blocks, dim, generator):
        return torch.linalg.qr(draws._randn(blocks, dim, dim, generator=generator))[0]

    monkeypatch.setitem(DIRECTIONS, "orthogonal", raw_qr)
    assert ratio() == pytest.approx(1.48, abs=0.05)


def test_a_draw_is_a_function_of_seed_and_number():
    a, b, other = (PositiveRandomFeatures(8, 20, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(a.omega, b.omega)
    assert not torch.allclose(a.omega, other.omega)
    a.redraw()
    a.redraw()
    assert int(a.draw) == 2
    assert not torch.allclose(a.omega, b.omega)
    b.redraw(2)
    assert torch.equal(a.omega, b.omega)
    a.redraw(0)
    assert torch.equal(a.omega, PositiveRandomFeatures(8, 20, seed=5).omega)


def test_maps_without_a_seed_differ_and_follow_torchs():
    torch.manual_seed(3)
    first, second = PositiveRandomFeatures(8, 20), PositiveRandomFeatures(8, 20)
    torch.manual_seed(3)
    again = PositiveRandomFeatures(8, 20)
    assert not torch.equal(first.omega, second.omega)
    assert torch.equal(first.omega, again.omega)


def test_a_draw_goes_on_from_what_was_saved():
    trained, resumed = PositiveRandomFeatures(8, 20, seed=5), PositiveRandomFeatures(8, 20, seed=77)
    trained.redraw()
    resumed.load_state_dict(trained.state_dict())
    assert torch.equal(resumed.omega, trained.omega)
    trained.redraw()
    resumed.redraw()
    assert torch.equal(resumed.omega, trained.omega)


def test_draws_do_not_touch_torchs_generator_nor_the_default_device():
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    PositiveRandomFeatures(8, 20, seed=5).redraw()
    assert torch.equal(torch.rand(()), expected)
    with torch.device("meta"):
        assert PositiveRandomFeatures(8, 20, seed=5).omega.is_meta
        assert not draw_omega(20, 8, generator=generator()).is_meta


def test_a_map_built_without_data_gets_its_draw_from_its_initial_buffers():
    with torch.device("meta"):
        phi = PositiveRandomFeatures(8, 20, seed=5)
    phi.to_empty(device="cpu")
    for name, value in phi.initial_buffers().items():
        getattr(phi, name).copy_(value)
    expected = PositiveRandomFeatures(8, 20, seed=5).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in phi.state_dict().items())
