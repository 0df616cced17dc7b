"""Drawn calls of the attention op, and the definition that each is held against, in float64."""

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from support.features import elementwise
from tarnn import feature_maps
from tarnn.numerics import default_eps
from tarnn.ops.linear import definition as linear_definition

MAPS = {  # those that the kernels make by name
    "identity": feature_maps.Identity(),
    "elu": feature_maps.Elu(),
    "relu": feature_maps.Relu(),
    "squared_relu": feature_maps.SquaredRelu(),
    "exp": feature_maps.Exp(),
}


@dataclass
class Case:
    """One drawn call: shapes all different, options, and tensors made from a seed."""

    b: int
    g: int
    r: int
    t: int
    d: int = 5
    e: int = 3
    feature_map: str = "elu"
    causal: bool = True
    normalize: bool = True
    masked: bool = False
    decay: str = "none"
    weighted: bool = False
    spread: float = 1.0  # standard deviation of q, k and of the log-weights
    seed: int = 0
    dtype: torch.dtype = torch.float64
    f: int = 0  # features, where they are not d
    steep: float = 0.0  # decays are stronger by this, and log-weights fall as fast: M is then that of old keys
    options: dict = field(init=False)

    def __post_init__(self):
        generator = torch.Generator(torch.get_default_device()).manual_seed(self.seed)
        rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        b, g, t = self.b, self.g, self.t
        self.q = (rand(b, g * self.r, t, self.d) * self.spread).to(self.dtype)
        self.k = (rand(b, g, t, self.d) * self.spread).to(self.dtype)
        self.v = rand(b, g, t, self.e).to(self.dtype)
        self.options = {}
        if self.masked:
            self.options["key_mask"] = rand(b, t) > -0.5
        if self.decay != "none":
            self.options["log_decay"] = self._log_decay(rand)
        if self.weighted:
            falling = min(self.steep, 20.0) * torch.arange(float(t), dtype=torch.float64)
            self.options["key_log_weight"] = rand(b, g, t) * 10 * self.spread - falling
        if self.decay != "none" and not self.causal:
            self.options["log_decay_back"] = self._log_decay(rand)

    def _log_decay(self, rand) -> torch.Tensor:
        b, g, t = self.b, self.g, self.t
        shape = {"head": (g,), "token": (b, g, t), "channel": (b, g, t, self.f or self.d)}[self.decay]
        log_decay = -rand(*shape).abs() - self.steep
        if self.decay == "head":
            return log_decay
        # some resets, some that come close to one
        return log_decay.masked_fill(rand(*shape) > 1.6, -torch.inf).masked_fill(rand(*shape) > 1.9, -1e5)

    def tensors(self) -> list[torch.Tensor]:
        return [self.q, self.k, self.v, *(x for x in self.options.values() if x.is_floating_point())]

    def definition(self) -> torch.Tensor:
        """float64, by the recurrence where causal, by the quadratic form else."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        (fq, q_scale), (fk, k_scale) = elementwise(self.feature_map, q), elementwise(self.feature_map, k)
        options = dict(self.options)
        if k_scale is not None:
            options["key_log_weight"] = options.get("key_log_weight", 0) + k_scale
        if self.causal:
            o = linear_definition.recurrent(
                fq, fk, v, normalize=self.normalize, eps=default_eps(torch.float64), **options
            )[0]
        else:
            o = linear_definition.quadratic(
                fq, fk, v, causal=False, normalize=self.normalize, eps=default_eps(torch.float64), **options
            )
        return o if self.normalize or q_scale is None else o * q_scale.exp()[..., None]


LENGTHS = [0, 1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 31, 63, 64, 65, 67]


@st.composite
def cases(draw, **fixed):
    causal = fixed.get("causal", draw(st.booleans()))
    drawn = {
        "b": draw(st.integers(1, 3)),
        "g": draw(st.integers(1, 2)),
        "r": draw(st.integers(1, 3)),
        "t": draw(st.sampled_from(LENGTHS)),
        "d": draw(st.sampled_from([1, 5, 8])),
        "e": draw(st.sampled_from([1, 3, 7])),
        "feature_map": draw(st.sampled_from(["elu", "relu", "squared_relu", "exp"])),
        "causal": causal,
        "normalize": draw(st.booleans()),
        "masked": draw(st.booleans()),
        "decay": draw(st.sampled_from(["none", "head", "token", "channel"])) if causal else "none",
        "weighted": draw(st.booleans()),
        "spread": draw(st.sampled_from([0.1, 1.0, 3.0])),
        "seed": draw(st.integers(0, 2**31)),
    }
    return Case(**{**drawn, **fixed})


def relative_error(x: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value; 0 for empty tensors."""
    if not expected.numel():
        assert x.shape == expected.shape
        return 0.0
    expected = expected.detach().double().cpu()
    return ((x.detach().double().cpu() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
