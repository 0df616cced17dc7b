"""Measure what each head of a pretrained model loses by hybrid attention, and find the map and λ that minimise it.

Everything here measures softmax attention as the model itself runs it (teacher-forced): a layer's inputs are those of the
original. Logits are formed block by block of queries, so that memory stays linear in the length.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tarnn.conversion.capture import AttentionInputs, capturing
from tarnn.conversion.options import build_map
from tarnn.conversion.rows import Row, length_of, run_model
from tarnn.feature_maps import FeatureMap, QueryClusters, options_of
from tarnn.feature_maps.statistics import FittedMap, Spread, spread_of
from tarnn.log_features import full_units
from tarnn.numerics import widen
from tarnn.ops.features import features, log_features

BLOCK = 256
SAMPLED = 256  # queries of a row, for clusters
# added to the λ that meets the mean far log-weight: the more an estimate varies, the less weight is best for it
FAR_BIAS_OFFSETS = (-8.0, -6.0, -5.0, -4.0, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5)
ZERO = torch.zeros(())  # the sum of nothing


class ExactKeys(NamedTuple):
    """Which keys are exact. Calibration leaves slots out: which keys they hold depends on what came before."""

    window: int
    sinks: int
    slots: int = 0


class HeadSizes(NamedTuple):
    """h query heads of width d share g key/value heads, whose values have width e."""

    h: int
    g: int
    d: int
    e: int


class LogitBlock(NamedTuple):
    """Some queries of a row and all keys of it: logits (h, c, t), −∞ for keys outside that set."""

    rows: slice
    exact: Tensor
    far: Tensor
    values: Tensor  # (h, t, e)


def logit_blocks(inputs: AttentionInputs, keys: ExactKeys) -> Iterator[LogitBlock]:
    """The teacher's logits, those of exact keys and of far keys apart, of a call with one row."""
    r, t = inputs.q.shape[1] // inputs.k.shape[1], inputs.q.shape[2]
    q, k, v = (widen(x[0]) for x in (inputs.q, inputs.k, inputs.v))
    k, v = k.repeat_interleave(r, 0), v.repeat_interleave(r, 0)
    j = torch.arange(t, device=q.device)
    for start in range(0, t, BLOCK):
        rows = slice(start, min(start + BLOCK, t))
        logits = inputs.scale * q[:, rows] @ k.mT
        i = j[rows, None]
        visible = j <= i if inputs.causal else torch.ones_like(j <= i)
        exact = visible & (((i - j).abs() < keys.window) | (j < keys.sinks))
        far = logits.masked_fill(~visible | exact, -torch.inf)
        yield LogitBlock(rows, logits.masked_fill(~exact, -torch.inf), far, v)


class ScaledFeatures(NamedTuple):
    """Features of queries and keys (h, t, f), and the logarithms of their scales (h, t)."""

    q: Tensor
    log_q: Tensor
    k: Tensor
    log_k: Tensor


def features_of(feature_map: FeatureMap, inputs: AttentionInputs) -> ScaledFeatures:
    """The features of a call with one row; key heads are repeated for their query heads."""
    d, r = inputs.q.shape[-1], inputs.q.shape[1] // inputs.k.shape[1]
    q, k = inputs.q * (inputs.scale * d**0.5), inputs.k
    log_q: Tensor | None
    log_k: Tensor | None
    if feature_map.log_features:
        y, x = log_features(feature_map, q, "queries"), log_features(feature_map, k, "keys")
        phi_q, phi_k, _, log_q, _ = full_units(y, x, x.new_full((*x.shape[:2], x.shape[3]), -torch.inf))
        log_k = None
    else:
        (phi_q, log_q), (phi_k, log_k) = features(feature_map, q, "queries"), features(feature_map, k, "keys")
    log_q = torch.zeros_like(phi_q[..., 0]) if log_q is None else log_q
    log_k = torch.zeros_like(phi_k[..., 0]) if log_k is None else log_k
    return ScaledFeatures(phi_q[0], log_q[0], phi_k[0].repeat_interleave(r, 0), log_k[0].repeat_interleave(r, 0))


def estimated_logits(block: LogitBlock, phi: ScaledFeatures) -> Tensor:
    """The estimated logits of the far keys, (h, c, t)."""
    products = (phi.q[:, block.rows] @ phi.k.mT).clamp(min=torch.finfo(phi.q.dtype).tiny).log()
    logits = products + phi.log_q[:, block.rows, None] + phi.log_k[:, None]
    return logits.masked_fill(block.far == -torch.inf, -torch.inf)


def softmax_mean(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax's mean of the values (h, c, e), and the log of its denominator (h, c); zeros and −∞ without any key."""
    log_weight = logits.logsumexp(-1)
    shift = log_weight.masked_fill(log_weight == -torch.inf, 0.0)
    return (logits - shift[..., None]).exp() @ values, log_weight


def far_share(far: Tensor, exact: Tensor) -> Tensor:
    """ρ, from log-weights: 0 if nothing is far."""
    return torch.sigmoid(far - exact).masked_fill(far == -torch.inf, 0.0)


@dataclass
class LayerStatistics:
    """Sums over texts of one layer; errors are squared distances to the teacher's output, per query head (h,)."""

    heads: HeadSizes
    feature_map: FeatureMap | None = None
    bias: Tensor = ZERO  # λ
    spreads: tuple[Spread, Spread] | None = None
    queries_of_rows: list[Tensor] = field(default_factory=list)  # a sample, (g, n, d)
    gap: Tensor = ZERO  # the teacher's far log-weight less the estimated one
    far_queries: Tensor = ZERO  # queries that have far keys
    rows: int = 0  # queries
    norm: Tensor = ZERO  # |output|²
    window: Tensor = ZERO
    wide: Tensor = ZERO  # of a window enlarged by the bytes of the features
    features: Tensor = ZERO  # (offset, h)
    far_share: Tensor = ZERO  # (offset, h): of the estimate
    teacher_share: Tensor = ZERO

    def add_spread(self, inputs: AttentionInputs, full: bool) -> None:
        """The moments of queries and keys, and a sample of the queries."""
        _, g, d, _ = self.heads
        q = inputs.q * (inputs.scale * d**0.5)
        sample = torch.linspace(0, q.shape[2] - 1, min(q.shape[2], SAMPLED), device=q.device).long()
        self.queries_of_rows.append(q[0, :, sample].unflatten(0, (g, -1)).flatten(1, 2))
        of_q, of_k = (spread_of(x, g, full=full).over_batch() for x in (q, inputs.k))
        before = self.spreads
        self.spreads = (of_q, of_k) if before is None else (before[0].merged(of_q), before[1].merged(of_k))

    def add_gap(self, inputs: AttentionInputs, keys: ExactKeys) -> None:
        """For λ: how far the mean log-weight of the far keys is from the estimated one."""
        assert self.feature_map is not None
        phi = features_of(self.feature_map, inputs)
        for block in logit_blocks(inputs, keys):
            has_far = (block.far > -torch.inf).any(-1)
            gap = block.far.logsumexp(-1) - estimated_logits(block, phi).logsumexp(-1)
            self.gap = self.gap + gap.masked_fill(~has_far, 0.0).sum(-1)
            self.far_queries = self.far_queries + has_far.sum(-1)

    def add_errors(self, inputs: AttentionInputs, keys: ExactKeys, wide: ExactKeys) -> None:
        """The errors of each choice that a head has."""
        phi = None if self.feature_map is None else features_of(self.feature_map, inputs)
        self.rows += inputs.q.shape[2]
        for block, wide_block in zip(logit_blocks(inputs, keys), logit_blocks(inputs, wide)):
            o_exact, exact = softmax_mean(block.exact, block.values)
            o_far, far = softmax_mean(block.far, block.values)
            rho = far_share(far, exact)
            o = o_exact + rho[..., None] * (o_far - o_exact)
            self.norm = self.norm + _square(o)
            self.teacher_share = self.teacher_share + rho.sum(-1)
            self.window = self.window + _square(o_exact - o)
            if phi is None:
                continue
            self.wide = self.wide + _square(softmax_mean(wide_block.exact, block.values)[0] - o)
            o_phi, estimated = softmax_mean(estimated_logits(block, phi), block.values)
            offsets = torch.tensor(FAR_BIAS_OFFSETS, device=o.device)[:, None, None]
            rho = far_share(estimated + self.bias[:, None] + offsets, exact)  # (offset, h, c)
            self.features = self.features + _square(o_exact + rho[..., None] * (o_phi - o_exact) - o)
            self.far_share = self.far_share + rho.sum(-1)


def _square(x: Tensor) -> Tensor:
    return x.square().sum((-2, -1))


@torch.no_grad()
def layer_sizes(model: PreTrainedModel, row: Row) -> dict[int, HeadSizes]:
    """The layers that the hybrid computes, found by running one row."""
    sizes: dict[int, HeadSizes] = {}

    def note(i: int, inputs: AttentionInputs) -> None:
        sizes[i] = HeadSizes(inputs.q.shape[1], inputs.k.shape[1], inputs.q.shape[3], inputs.v.shape[3])

    with capturing(model, note):
        run_model(model, row)
    return dict(sorted(sizes.items()))


@torch.no_grad()
def calibrate(
    model: PreTrainedModel, rows: Sequence[Row], feature_map: str | Mapping[str, Any] | None, keys: ExactKeys
) -> dict[int, LayerStatistics]:
    """The layers that the hybrid computes, each with its calibrated map and λ.

    Raises ValueError, after one row, for a model without such layers, and for a map that they can't have.
    """
    layers = {i: LayerStatistics(sizes) for i, sizes in layer_sizes(model, rows[0]).items()}
    if not layers:
        raise ValueError(
            f"no layer of {type(model).__name__} calls an attention function over its whole input, so there is nothing "
            "to convert: its layers are sliding windows, cross-attention, or not attention."
        )
    if feature_map is None:
        return layers
    options = {"name": feature_map} if isinstance(feature_map, str) else dict(feature_map)
    known = options_of(options["name"])
    implied: dict[str, Any] = {x: True for x in ("centre", "balance") if x in known}
    sampled = sum(min(length_of(row), SAMPLED) for row in rows)
    for i, layer in layers.items():
        h, g, d, _ = layer.heads
        layer.feature_map = build_map({"seed": i, **implied, **options} if "seed" in known else implied | options, d, g)
        if isinstance(layer.feature_map, QueryClusters) and layer.feature_map.num_features(d) > sampled * (h // g):
            raise ValueError(
                f"{layer.feature_map.num_features(d):,} clusters need as many queries or more, and these texts have "
                f"{sampled * (h // g):,} per head; take fewer features, or more texts."
            )
    full = any(isinstance(x.feature_map, FittedMap) and x.feature_map.full_spread for x in layers.values())
    with capturing(model, lambda i, inputs: layers[i].add_spread(inputs, full=full)):
        for row in rows:
            run_model(model, row)
    for layer in layers.values():
        if isinstance(layer.feature_map, FittedMap) and layer.feature_map.adapts:
            assert layer.spreads is not None
            layer.feature_map.calibrate(*layer.spreads)
        if isinstance(layer.feature_map, QueryClusters):
            layer.feature_map.cluster(torch.cat(layer.queries_of_rows, 1))
    with capturing(model, lambda i, inputs: layers[i].add_gap(inputs, keys)):
        for row in rows[:8]:
            run_model(model, row)
    for layer in layers.values():
        layer.bias = layer.gap / layer.far_queries.clamp(min=1)
    return layers
