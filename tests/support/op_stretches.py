"""Calls of ops whose sequences ranks share, and the same calls by one process: outputs, states and all gradients."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn import ops
from tarnn.parallel import sequence
from tarnn.parallel.group import active, among

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One call, made from its seed on every rank; `lengths` are those of the ranks' stretches."""

    op: str
    lengths: tuple[int, ...] = (13, 7, 20, 9)
    cuts: tuple[int, ...] = ()
    b: int = 2
    heads: tuple[int, int] = (2, 2)  # of queries and keys, and of values
    decay: str = ""  # "token" or "channel"
    masked: bool = False
    state: bool = False
    state_wanted: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    dtype: str = "float64"

    @property
    def rows(self) -> int:
        return 1 if self.cuts else self.b

    @property
    def sequences(self) -> int:
        return len(self.cuts) - 1 if self.cuts else self.b


class Op(NamedTuple):
    """tensors(case, t, rand): the inputs of a whole call. apply(case, inputs, masks): o, and the tensors of the state behind it,
    by name. axis: of time, in inputs but for states (`state …`) and `constant` ones, and in o."""

    tensors: Callable[[Case, int, Callable[..., Tensor]], Tensors]
    apply: Callable[[Case, Tensors, dict[str, Any]], tuple[Tensor, Tensors]]
    axis: int
    constant: tuple[str, ...] = ()


def _decay(case: Case, rand: Callable, *shape: int) -> Tensors:
    if not case.decay:
        return {}
    decay = -rand(*shape).abs() / 3
    return {"log_decay": decay.masked_fill(rand(*shape) > 1.8, -torch.inf) if "resets" in case.decay else decay}


def _delta_tensors(case: Case, t: int, rand: Callable) -> Tensors:
    (h, m), b, d, e = case.heads, case.rows, 4, 3
    n = max(min(h, m), m) if m >= h else m
    g = m if h > m else h
    channels = (d,) if case.decay.startswith("channel") else ()
    found = {"q": rand(b, h, t, d), "k": rand(b, g, t, d), "v": rand(b, m, t, e), "beta": 2 * rand(b, n, t).sigmoid()}
    state = {"state S": rand(case.sequences, n, d, e)} if case.state else {}
    return found | _decay(case, rand, b, n, t, *channels) | state


def _by(
    op: Callable, state_of: Callable[[Tensor], Any], name: str, **fixed: Any
) -> Callable[..., tuple[Tensor, Tensors]]:
    """A call of this op, whose state has one tensor of that name."""

    def apply(case: Case, x: Tensors, masks: dict[str, Any]) -> tuple[Tensor, Tensors]:
        state = {"state": state_of(x.pop(f"state {name}"))} if case.state else {}
        o, *after = _pair(op(**x, **state, **masks, **fixed, return_state=case.state_wanted))
        return o, {name: getattr(after[0], name)} if after else {}

    return apply


def _low_rank_tensors(case: Case, t: int, rand: Callable) -> Tensors:
    h, b, d, e = case.heads[0], case.rows, 4, 3
    channels = (d,) if case.decay.startswith("channel") else ()
    direction = torch.nn.functional.normalize(rand(b, h, t, d), dim=-1)
    found = {"q": rand(b, h, t, d), "k": rand(b, h, t, d), "v": rand(b, h, t, e), "a": -direction}
    found["b"] = direction * rand(b, h, t, d).sigmoid()
    state = {"state S": rand(case.sequences, h, d, e)} if case.state else {}
    return found | _decay(case, rand, b, h, t, *channels) | state


def _convolution_tensors(case: Case, t: int, rand: Callable) -> Tensors:
    options, c = dict(case.options), 5
    width = options.get("width", 4)
    state = {"state tokens": rand(case.sequences, width - 1, c)} if case.state else {}
    return {"x": rand(case.rows, t, c), "weight": rand(c, width), "bias": rand(c)} | state


def _convolution(case: Case, x: Tensors, masks: dict[str, Any]) -> tuple[Tensor, Tensors]:
    causal = dict(case.options).get("causal", True)
    state = {"state": ops.ConvolutionState(x.pop("state tokens"))} if case.state else {}
    wanted = case.state_wanted and causal
    o, *after = _pair(
        ops.short_convolution(**x, **state, **masks, causal=causal, activation="silu", return_state=wanted)
    )
    return o, {"tokens": after[0].tokens} if after else {}


def _diagonal_tensors(case: Case, t: int, rand: Callable) -> Tensors:
    decay = _decay(replace(case, decay=case.decay or "token"), rand, case.rows, t, 5)
    return {"x": rand(case.rows, t, 5)} | decay | ({"state h": rand(case.sequences, 5)} if case.state else {})


def _selective_tensors(case: Case, t: int, rand: Callable) -> Tensors:
    b, c, n = case.rows, 5, 3
    found = {
        "x": rand(b, t, c),
        "dt": rand(b, t, c).abs(),
        "A": -rand(c, n).abs(),
        "B": rand(b, t, n),
        "C": rand(b, t, n),
    }
    return found | {"D": rand(c)} | ({"state h": rand(case.sequences, c, n)} if case.state else {})


def _softmax_tensors(case: Case, t: int, rand: Callable) -> Tensors:
    (h, g), b, d, e, options = case.heads, case.rows, 4, 3, dict(case.options)
    found = {"q": rand(b, h, t, d), "k": rand(b, g, t, d), "v": rand(b, g, t, e)}
    if options.get("weighted"):
        found["key_log_weight"] = rand(b, g, t)
    if case.state:
        found |= {"state k": rand(b, g, 3, d), "state v": rand(b, g, 3, e)}
    return found


def _softmax(case: Case, x: Tensors, masks: dict[str, Any]) -> tuple[Tensor, Tensors]:
    options: dict[str, Any] = {}
    if case.state:
        total = sum(case.lengths)
        k, v = x.pop("state k"), x.pop("state v")
        options["state"] = ops.KVCache(k, v, 3).resized(3 + total)
        options["state"] = ops.KVCache(
            *(torch.cat([a, a.new_zeros(*a.shape[:2], total, a.shape[3])], 2) for a in (k, v)), 3
        )
    wanted = case.state_wanted and not case.cuts and "key_log_weight" not in x
    causal = dict(case.options).get("causal", True)
    o, *after = _pair(ops.softmax_attention(**x, **masks, **options, causal=causal, return_state=wanted))
    return o, after[0].tensors() if after else {}


def _hybrid_tensors(case: Case, t: int, rand: Callable) -> Tensors:
    (h, g), b, d, e = case.heads, case.rows, 4, 3
    return {"q": rand(b, h, t, d), "k": rand(b, g, t, d), "v": rand(b, g, t, e)} | _decay(case, rand, b, g, t)


def _hybrid(case: Case, x: Tensors, masks: dict[str, Any]) -> tuple[Tensor, Tensors]:
    options = dict(case.options)
    options.setdefault("causal", True)
    if case.state:  # what some tokens before have left behind
        generator = torch.Generator().manual_seed(7)
        q, k, v = (
            torch.randn(case.sequences, y.shape[1], 5, y.shape[3], generator=generator, dtype=torch.float64).to(y.dtype)
            for y in (x["q"], x["k"], x["v"])
        )
        with among(None):
            options["state"] = ops.hybrid_attention(q, k, v, return_state=True, **options)[1]
    o, *after = _pair(ops.hybrid_attention(**x, **masks, return_state=case.state_wanted, **options))
    return o, {name: getattr(after[0], name).double() for name in ("k", "v", "fade", "count")} if after else {}


def _pair(outputs: Any) -> tuple:
    return outputs if isinstance(outputs, tuple) else (outputs,)


OPS = {
    "delta_rule": Op(_delta_tensors, _by(ops.delta_rule, ops.DeltaState, "S", normalize_qk=True), 2),
    "low_rank_delta_rule": Op(_low_rank_tensors, _by(ops.low_rank_delta_rule, ops.DeltaState, "S"), 2),
    "short_convolution": Op(_convolution_tensors, _convolution, 1, ("weight", "bias")),
    "diagonal_scan": Op(_diagonal_tensors, _by(ops.diagonal_scan, ops.ScanState, "h"), 1),
    "selective_scan": Op(_selective_tensors, _by(ops.selective_scan, ops.ScanState, "h"), 1, ("A", "D")),
    "softmax_attention": Op(_softmax_tensors, _softmax, 2),
    "hybrid_attention": Op(_hybrid_tensors, _hybrid, 2),
}


def tensors(case: Case) -> Tensors:
    """All tensors of the whole call."""
    generator = torch.Generator().manual_seed(2)
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    found = {
        name: x.to(getattr(torch, case.dtype)) if x.is_floating_point() else x
        for name, x in OPS[case.op].tensors(case, sum(case.lengths), rand).items()
    }
    if case.masked:
        found["key_mask"] = rand(case.rows, sum(case.lengths)) > -0.5
    return found


def results(case: Case, given: Tensors, start: int, share: float) -> Tensors:
    """o, the state behind, and the gradients of Σ weights·o + share · (weighted sums over that state)."""
    op, masks = OPS[case.op], {"key_mask": given["key_mask"]} if case.masked else {}
    if case.cuts:
        masks["cu_seqlens"] = torch.tensor(case.cuts, dtype=torch.int32)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items() if x.is_floating_point()}
    o, state = op.apply(case, leaves, masks)
    real = {name: torch.where(x.isfinite(), x, 0.0) for name, x in state.items() if x.requires_grad}
    loss = (o * _weights(case, o, op.axis, start)).sum()
    loss = loss + share * sum(
        (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in real.values()
    )
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    found = {"o": o} | {f"after {name}": x for name, x in state.items()}
    found |= {f"gradient of {name}": x for name, x in zip(leaves, gradients)}
    return {name: x.detach() for name, x in found.items()}


def _weights(case: Case, o: Tensor, axis: int, start: int) -> Tensor:
    shape = list(o.shape)
    shape[axis] = sum(case.lengths)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(o.dtype)
    return whole.narrow(axis, start, o.shape[axis])


def _axis(case: Case, name: str) -> int | None:
    name = name.removeprefix("gradient of ")
    op = OPS[case.op]
    if name.startswith(("state ", "after ")) or name in op.constant:
        return None
    return 1 if name == "key_mask" else op.axis


def by_one(case: Case) -> Tensors:
    return results(case, tensors(case), 0, 1.0)


def on_rank(group: Any, rank: int, case: Case) -> Tensors:
    start, mine = sum(case.lengths[:rank]), {}
    for name, x in tensors(case).items():
        axis = _axis(case, name)
        mine[name] = x if axis is None else x.narrow(axis, start, case.lengths[rank])
    with sequence(group):
        assert active() is not None or group.size() == 1
        return results(case, mine, start, 1.0 / group.size())


def call_here(case: Case, rank: int) -> Callable[[bool], None]:
    """A function that makes the call of this rank, with its backward pass or without."""
    start, mine = sum(case.lengths[:rank]), {}
    for name, x in tensors(case).items():
        axis = _axis(case, name)
        mine[name] = x if axis is None else x.narrow(axis, start, case.lengths[rank])
    masks = {"key_mask": mine.pop("key_mask")} if case.masked else {}

    def call(backward: bool) -> None:
        given = {name: x.clone().requires_grad_(backward and x.is_floating_point()) for name, x in mine.items()}
        o, _ = OPS[case.op].apply(case, given, masks)
        if backward:
            o.sum().backward()

    return call


def joined(case: Case, parts: list[Tensors]) -> Tensors:
    return join(parts, lambda name: _axis(case, name))


def join(parts: list[Tensors], axis_of: Callable[[str], int | None]) -> Tensors:
    """The ranks' results as one process has them: stretches end to end, gradients of what all share summed."""
    whole = {}
    for name in parts[0]:
        each, axis = [part[name] for part in parts], axis_of(name)
        if axis is not None:
            whole[name] = torch.cat(each, axis)
        elif name.startswith("gradient"):
            whole[name] = torch.stack(each).sum(0)
        else:
            assert all(torch.equal(x, each[0]) for x in each), f"{name} differs between ranks"
            whole[name] = each[0]
    return whole
