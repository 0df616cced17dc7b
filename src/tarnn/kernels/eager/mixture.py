"""Values from mixtures of logistics in plain PyTorch: a component by Gumbel's trick, a point of its logistic, the value
nearest to that."""

from torch import Tensor

from tarnn.kernels.eager import refusal as refusal
from tarnn.kernels.mixture import Call
from tarnn.numerics import widen


def forward(call: Call) -> Tensor:
    """Values (…) int64."""
    logits, means, log_scales = widen(call.parameters).chunk(3, dim=-1)
    which = (logits / call.temperature - call.exponential.log()).argmax(-1, keepdim=True)
    logistic = call.uniform.log() - (-call.uniform).log1p()  # −∞ for 0: the lowest value
    scale = log_scales.clamp(call.least, call.most).gather(-1, which).exp()
    point = means.gather(-1, which) + call.temperature * scale * logistic
    return ((point + 1) * 127.5).round().clamp(0, 255).long().squeeze(-1)
