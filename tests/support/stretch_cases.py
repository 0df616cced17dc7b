"""Calls of linear attention that ranks share, and the same calls by one process: outputs, states and all gradients."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from support.op_stretches import join
from tarnn import LinearState, feature_maps, linear_attention
from tarnn.parallel import sequence

TIME = {"q": 2, "k": 2, "v": 2, "key_mask": 1, "log_decay": 2, "key_log_weight": 2}  # axes
STATE = ("S", "z", "M")


class Own(nn.Module):
    """A map of one's own, with parameters, which the kernels don't know."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.inner = nn.Linear(head_dim, head_dim + 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(self.inner(x))


@dataclass(frozen=True)
class Call:
    """One call, made from its seed on every rank; `lengths` are those of the ranks' stretches."""

    lengths: tuple[int, ...] = (13, 7, 20, 9)
    b: int = 2
    h: int = 2
    g: int = 2
    m: int = 2
    d: int = 5
    e: int = 3
    feature_map: str = "elu"
    causal: bool = True
    normalize: Any = True
    decay: str = ""
    masked: bool = False
    weighted: bool = False
    cuts: tuple[int, ...] = ()
    state: str = ""  # "sums", or "maxima": with M
    spread: float = 1.0
    dtype: str = "float64"
    state_wanted: bool = True

    @property
    def type(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def map(self) -> nn.Module:
        torch.manual_seed(1)
        make = {
            "own": lambda: Own(self.d),
            "hedgehog": lambda: feature_maps.Hedgehog(self.d, self.g),
            "favor": lambda: feature_maps.PositiveRandomFeatures(self.d, 6, seed=1),
            "clusters": lambda: feature_maps.make("clusters", head_dim=self.d, num_heads=self.g, num_features=6),
            "dpfp": lambda: feature_maps.make("dpfp", head_dim=self.d, num_heads=self.g),
            "elu": feature_maps.Elu,
            "identity": feature_maps.Identity,
            "exp": feature_maps.Exp,
        }
        phi = make[self.feature_map]().to(self.type)
        for x in phi.buffers():  # ω too
            if x.is_floating_point():
                x.requires_grad_()
        return phi

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the whole call."""
        generator = torch.Generator().manual_seed(2)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        b, m, t, d, e = self.b, self.m, sum(self.lengths), self.d, self.e
        found = {"q": rand(b, self.h, t, d), "k": rand(b, self.g, t, d), "v": rand(b, m, t, e)}
        found["q"], found["k"] = found["q"] * self.spread, found["k"] * self.spread
        f = self.map().num_features(d) if hasattr(self.map(), "num_features") else d + 2
        if self.decay:
            shape = {"head": (m,), "token": (b, m, t), "channel": (b, m, t, f)}[self.decay.split()[0]]
            found["log_decay"] = -rand(*shape).abs() / 5
            if "resets" in self.decay:
                found["log_decay"] = found["log_decay"].masked_fill(rand(*shape) > 1.8, -torch.inf)
        if self.weighted:
            found["key_log_weight"] = rand(b, m, t) * 10
        if self.masked:
            found["key_mask"] = rand(b, t) > -0.5
        n = len(self.cuts) - 1 if self.cuts else b
        if self.state:
            found["S"], found["z"] = rand(n, m, f, e), rand(n, m, f).abs() + 1
            if self.state == "maxima":
                found["M"] = rand(n, m)
        return {name: x if x.dtype == torch.bool else x.to(self.type) for name, x in found.items()}

    def apply(self, tensors: dict[str, Tensor], phi: nn.Module) -> Any:
        options = {name: x for name, x in tensors.items() if name not in (*STATE, "q", "k", "v")}
        if self.cuts:
            options["cu_seqlens"] = torch.tensor(self.cuts, dtype=torch.int32)
        if self.state:
            options["state"] = LinearState(*(tensors.get(name) for name in STATE))
        return linear_attention(
            *(tensors[name] for name in "qkv"),
            phi,
            causal=self.causal,
            normalize=self.normalize,
            return_state=self.state_wanted,
            **options,
        )

    def results(self, tensors: dict[str, Tensor], weights: Tensor, share: float) -> dict[str, Tensor]:
        """o, the state behind it, and the gradients of Σ weights·o + share · (sums over that state)."""
        phi = self.map()
        leaves = {name: x for name, x in tensors.items() if x.is_floating_point() and name != "M"}
        leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
        outputs = self.apply({**tensors, **leaves}, phi)
        o, state = outputs if self.state_wanted else (outputs, None)
        loss, found = (o * weights).sum(), {"o": o}
        if state is not None:
            # in true units, whatever M is
            units = (
                torch.ones(()) if state.M is None else state.M.exp().reshape(*state.M.shape, *[1] * (3 - state.M.ndim))
            )
            found |= {"state S": state.S * units[..., None], "state z": state.z * units}
            loss = loss + share * sum((found[f"state {x}"] * _like(found[f"state {x}"])).sum() for x in "Sz")
        everything = dict(leaves) | {f"φ {name}": x for name, x in (*phi.named_parameters(), *phi.named_buffers())}
        wanted = {name: x for name, x in everything.items() if x.requires_grad}
        gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
        found |= {f"gradient of {name}": x for name, x in zip(wanted, gradients)}
        return {name: x.detach() for name, x in found.items()}


def _like(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)


def weights(call: Call) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    heads = max(call.h, call.m)
    return torch.randn(call.b, heads, sum(call.lengths), call.e, generator=generator, dtype=torch.float64).to(call.type)


def axis_of(name: str, call: Call) -> int | None:
    """The time axis of a tensor of a call or of its results."""
    name = name.removeprefix("gradient of ")
    if name.startswith("log_decay") and call.decay.startswith("head"):
        return None
    return 2 if name == "o" else TIME.get(name)


def stretch(tensors: dict[str, Tensor], call: Call, rank: int) -> dict[str, Tensor]:
    start = sum(call.lengths[:rank])
    axes = {name: axis_of(name, call) for name in tensors}
    return {
        name: x if (axis := axes[name]) is None else x.narrow(axis, start, call.lengths[rank])
        for name, x in tensors.items()
    }


def by_one(call: Call) -> dict[str, Tensor]:
    return call.results(call.tensors(), weights(call), 1.0)


def on_rank(group: Any, rank: int, call: Call) -> dict[str, Tensor]:
    mine, mine_weights = stretch(call.tensors(), call, rank), stretch({"o": weights(call)}, call, rank)["o"]
    with sequence(group):
        return call.results(mine, mine_weights, 1.0 / group.size())


def joined(call: Call, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return join(parts, lambda name: axis_of(name, call))


def in_float64(call: Call) -> Call:
    return replace(call, dtype="float64")
