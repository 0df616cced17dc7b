"""Derivatives of linear attention's operator in all of its inputs at once: those of a projection and of a state too."""

import pytest
import torch
from support.attention_cases import Case

from tarnn.ops.linear.op import attend

UNPROJECTED = (1.0, 0.0, 0.0, 0.0)  # factor, square, offset, shift


def everything(
    causal: bool, b: int = 1, t: int = 6, decay: str = "token", projected: bool = False
) -> list[torch.Tensor | None]:
    """The first ten inputs of the operator, all there: q, k, v, log_decay, key_log_weight, S, z, omega, bias, M; without
    a projection all but omega and bias, with one of five features a head."""
    case = Case(b=b, g=2, r=2, t=t, d=3, e=2, decay=decay if causal else "none", weighted=True, spread=0.5)
    f = 5 if projected else 3
    S, z = torch.rand(b, 2, f, 2).double(), torch.rand(b, 2, f).double() + 0.5
    omega = [torch.randn(1, 2, f, 3).double() / 2, torch.randn(1, 2, f).double() / 4] if projected else [None, None]
    log_decay = case.options.get("log_decay")
    if log_decay is not None:
        log_decay = log_decay.clamp(min=-3)  # numerical differences can't cross −∞
    given = [case.q, case.k, case.v, log_decay, case.options["key_log_weight"], S, z, *omega]
    return [*(x if x is None else x.requires_grad_() for x in given), torch.rand(b, 2).double()]


OPTIONS = [
    ("elu", True, True, UNPROJECTED),
    ("exp", True, False, UNPROJECTED),
    ("exp", False, True, UNPROJECTED),
    ("identity", True, False, UNPROJECTED),
    ("squared_relu", False, True, UNPROJECTED),
    ("exp", True, True, (0.7, 0.5, -0.3, 0.0)),
    ("exp", False, False, (0.7, 0.5, -0.3, 0.0)),
    ("relu", True, True, (0.7, 0.0, 0.1, 0.01)),
    ("elu", False, True, (0.7, 0.2, 0.0, 0.01)),
    ("identity", True, False, (0.7, 0.0, 0.1, 0.0)),
]


@pytest.mark.thorough
@pytest.mark.parametrize("cu_seqlens", [None, pytest.param([0, 2, 2, 6], marks=pytest.mark.slow)])
@pytest.mark.parametrize(("feature_map", "causal", "normalize", "projection"), OPTIONS)
def test_first_and_second_derivatives(feature_map, causal, normalize, projection, cu_seqlens):
    """gradcheck and gradgradcheck of o and of the true sums S·e^M, z·e^M, in every differentiable input at once."""
    tensors = everything(causal, projected=projection != UNPROJECTED)
    cu = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    if cu is not None:
        S, z, M = (tensors[i].detach().expand(3, *tensors[i].shape[1:]).clone() for i in (5, 6, 9))
        tensors[5:7], tensors[9] = [S.requires_grad_(), z.requires_grad_()], M
    *inputs, M = tensors
    given = [x for x in inputs if x is not None]

    def f(*xs):
        it = iter(xs)
        o, _, S, z, M_out = attend.forward_op(
            *(None if x is None else next(it) for x in inputs),
            M,
            None,
            cu,
            feature_map,
            causal,
            normalize,
            1e-30,
            *projection,
            False,
        )
        scale = M_out.exp()
        return o, S * scale[..., None, None], z * scale[..., None]

    assert torch.autograd.gradcheck(f, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, given, fast_mode=True)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.one_path
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_opcheck(causal, packed):
    """With a bias, which no row of the suite over all ops has."""
    cu = torch.tensor([0, 4, 6], dtype=torch.int32) if packed else None
    tensors = everything(causal, projected=True)
    if packed:
        tensors[5:7], tensors[9] = [None, None], None
    options = (None, cu, "exp", causal, True, 1e-30, 0.7, 0.5, 0.0, 0.0, False)
    torch.library.opcheck(attend.forward_op, (*tensors, *options))
    if packed:
        return  # its bounds are read from data, which the second derivative cannot do while it is being traced
    o, den, S, z, M = attend.forward_op(*tensors, *options)
    grads = [torch.randn_like(x) for x in (o, S, z)]
    torch.library.opcheck(
        attend.backward_op, (*grads, *(x.detach() for x in (o, den, S, z, M)), None, True, *tensors, *options)
    )
