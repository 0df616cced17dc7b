"""The sampler in one call draws what the one in plain PyTorch draws, from the same seed."""

import pytest
import torch

from tarnn.kernels.cpu import library
from tarnn.models import LogisticMixture

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("shape", [(), (1,), (3000,), (20, 7)])
def test_the_same_values_from_the_same_seed(shape, temperature):
    likelihood = LogisticMixture(7)
    parameters = 3 * torch.randn(*shape, 21, generator=torch.Generator().manual_seed(0))
    drawn = likelihood.sample(parameters, torch.Generator().manual_seed(1), temperature)
    with library.disabled():
        expected = likelihood.sample(parameters, torch.Generator().manual_seed(1), temperature)
    assert drawn.shape == shape
    assert drawn.dtype == torch.int64
    assert torch.equal(drawn, expected)


def test_values_stay_in_their_range():
    parameters = torch.tensor([[0.0, 50.0, 1.0], [0.0, -50.0, 1.0], [0.0, float("nan"), 1.0], [0.0, 0.0, 500.0]])
    values = LogisticMixture(1).sample(parameters.repeat(500, 1)).view(500, 4)
    assert values[:, :3].unique(dim=0).tolist() == [[255, 0, 0]]
    assert values[:, 3].unique().numel() > 1  # a scale beyond the bounds is the largest
    assert values.min() >= 0
    assert values.max() <= 255


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_type_is_not_that_of_the_noise(dtype):
    parameters = 3 * torch.randn(200, 21, generator=torch.Generator().manual_seed(0))
    expected = LogisticMixture(7).sample(parameters, torch.Generator().manual_seed(1))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        drawn = LogisticMixture(7).sample(parameters, torch.Generator().manual_seed(1))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(drawn, expected)
