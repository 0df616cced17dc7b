"""The definitions against each other, and against sums done by hand."""

import pytest
import torch
from support.attention_cases import Case, relative_error
from support.features import elementwise

from tarnn.ops.linear import definition as linear_definition

pytestmark = pytest.mark.one_path


def test_by_hand():
    """Two tokens, one feature: o_0 = v_0, o_1 = (k_0 v_0 + k_1 v_1)/(k_0 + k_1), q cancels."""
    fq, fk = torch.tensor([[[[5.0], [7.0]]]]), torch.tensor([[[[1.0], [3.0]]]])
    v = torch.tensor([[[[10.0], [20.0]]]])
    assert linear_definition.quadratic(fq, fk, v, causal=True).flatten().tolist() == [10.0, 17.5]
    assert linear_definition.quadratic(fq, fk, v, causal=True, normalize=False).flatten().tolist() == [50.0, 490.0]
    decay = torch.tensor([[[0.0, 0.5]]]).log()  # halves what came before token 1
    assert linear_definition.quadratic(fq, fk, v, causal=True, log_decay=decay).flatten().tolist() == pytest.approx(
        [10, 65 / 3.5]
    )
    weight = torch.tensor([[[3.0, 1.0]]]).log()  # token 0 counts three times
    assert linear_definition.recurrent(fq, fk, v, key_log_weight=weight)[0].flatten().tolist() == pytest.approx(
        [10, 15]
    )
    mask = torch.tensor([[False, True]])
    assert linear_definition.recurrent(fq, fk, v, key_mask=mask)[0].flatten().tolist() == [0, 20]


@pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_quadratic_equals_recurrent(decay, masked, normalize):
    case = Case(b=2, g=2, r=2, t=11, decay=decay, masked=masked, weighted=True, normalize=normalize)
    fq, fk = elementwise("elu", case.q)[0], elementwise("elu", case.k)[0]
    quadratic = linear_definition.quadratic(fq, fk, case.v, causal=True, normalize=normalize, **case.options)
    assert (
        relative_error(quadratic, linear_definition.recurrent(fq, fk, case.v, normalize=normalize, **case.options)[0])
        < 1e-12
    )
