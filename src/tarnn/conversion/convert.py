"""A pretrained model calibrated for hybrid attention: for each layer a map, for each head λ and what it computes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tarnn.conversion.calibration import SAMPLED, TRUST, Layer, Near
from tarnn.conversion.calibration import heads_of as shape_of
from tarnn.conversion.capture import Seen, watching
from tarnn.conversion.options import HYBRID, attention_layers, child_of, heads_of, made_map, set_options
from tarnn.conversion.report import HeadReport, LayerReport, Report
from tarnn.feature_maps import QueryClusters, make, options_of
from tarnn.feature_maps.statistics import FittedMap
from tarnn.ops.hybrid.op import hybrid_attention

Row = Mapping[str, Tensor]  # what a model is called with: one text
Progress = Callable[[str], None]


def convert(
    model: Any,
    texts: Sequence[Any] | Tensor,
    *,
    tokenizer: Any = None,
    window: int = 256,
    sinks: int = 4,
    slots: int = 0,
    feature_map: str | Mapping[str, Any] | None = "clusters",
    mode: str = "choose",
    exact_layers: int = 0,
    budget: int | None = None,
    report: Progress = lambda _: None,
) -> Report:
    """Gives each layer of a model of transformers hybrid attention, calibrated on some texts; changes the model.

    Calibrated per key/value head: the map's centre, balance and A; per query head λ (far bias). A head estimates far keys
    by features where its output then errs less, on these texts, than with window and sinks alone and than with a window
    that is larger by the bytes of the features; it has its window and sinks alone otherwise. So have all heads where the
    model as a whole loses more with the features than without, and all queries further from the start than the texts reach.

    Args:
        texts: 32 to 128 of them, as long as the model will meet (features stand for nothing beyond the length that a quarter
            of them reach): strings (with a tokenizer), ids (n, t) or a list
            of ids (t,), or dicts of what the model is called with. A quarter is kept to measure what the model loses.
        window, sinks, slots: keys that are exact; slots (causal models only) hold those that features represent worst.
        feature_map: a name or {"name": …, options}. Clusters are those of the texts' queries; estimates of softmax's kernel
            function (oprf, favor …) are centred and balanced. None: window and sinks alone.
        mode: "features": every head has them, whatever it loses (to train them, or beside slots, which the choice leaves out).
        exact_layers: so many layers stay softmax attention: those whose conversion alone harms the loss most.
        budget: bytes of keys, values and sums for one sequence of the texts' length; key/value heads become exact, those
            first whose error, times the harm of their layer, is largest, while the bytes suffice.
        report: takes lines about progress.

    Returns what was measured; `model.save_pretrained(…)` keeps the rest. Raises ValueError for a model without an
    attention interface, for options out of range, for texts no longer than window + sinks, and for a budget that is too
    small; all of that before the texts are looked at.
    """
    check_options(window, sinks, slots, mode, exact_layers, budget)
    rows = rows_of(texts, tokenizer, model)
    kept = max(1, len(rows) // 4) if len(rows) > 1 else 0
    seen = rows[: len(rows) - kept]
    near, lengths = Near(window, sinks, slots), sorted(map(length_of, seen), reverse=True)
    length = lengths[(len(lengths) - 1) // 4]  # that a quarter of the texts reach
    if length <= window + sinks:
        raise ValueError(
            f"calibration needs texts longer than window + sinks = {window + sinks} tokens, or nothing is far; a quarter of "
            f"these {len(seen)} must be, and the longest has {lengths[0]}. Pass longer texts, or choose a smaller window."
        )
    model.eval()
    check_fit(model, rows, feature_map, exact_layers, budget, near, length)
    check = Check(model, rows[len(rows) - kept :] if kept else rows)
    before = check.softmax
    report("queries and keys of each layer")
    layers = gather(model, seen, feature_map, near)
    report("output errors of each head")
    reports = choose(model, seen, layers, near, length, always=mode == "features")
    model.set_attn_implementation(HYBRID)
    wide = None if feature_map is None else max(wider(model, x, near).window for x in layers.values())
    alone = check.with_window(near)
    wide_loss = None if wide is None else check.with_window(near._replace(window=wide))
    if mode == "choose" and wide is not None and check.loss() > max(alone, before):
        report("together the features lose more than window and sinks alone: no head has them")
        for one in reports:
            for head in one.heads:
                head.mode = "window"
            set_options(model, layers=one.layer, mode=one.modes)
    if exact_layers or budget is not None:
        report(f"the harm of each of {len(reports)} layers")
        for one in reports:
            one.harm = check.with_one_layer(one.layer) - before
        keep_layers(reports, exact_layers)
        keep_heads(reports, budget)
        for one in reports:
            set_options(model, layers=one.layer, mode=one.modes)
    report("what the model loses")
    options = {
        **near._asdict(),
        "feature_map": feature_map,
        "mode": mode,
        "exact_layers": exact_layers,
        "budget": budget,
    }
    return Report(
        options,
        len(seen),
        len(check.rows),
        length,
        check.unit,
        before,
        check.loss(),
        reports,
        window_alone=alone,
        wide_window=wide,
        wide_alone=wide_loss,
    )


def check_options(window: int, sinks: int, slots: int, mode: str, exact_layers: int, budget: int | None) -> None:
    """ValueError for options that are out of range, whatever the model."""
    least = {"window": (window, 1), "sinks": (sinks, 0), "slots": (slots, 0), "exact_layers": (exact_layers, 0)}
    least |= {} if budget is None else {"budget": (budget, 1)}
    for name, (value, smallest) in least.items():
        if type(value) is not int or value < smallest:
            raise ValueError(f"{name} must be a whole number, {smallest} or more; got {value!r}.")
    if mode not in ("choose", "features"):
        raise ValueError(f"mode must be choose or features; got {mode!r}.")


def check_length(length: int, near: Near) -> None:
    """ValueError for rows in which nothing is far."""
    if length <= near.window + near.sinks:
        raise ValueError(
            f"texts must be longer than window + sinks = {near.window + near.sinks} tokens, or nothing is far; got "
            f"{length:,} tokens. Take longer ones, or a smaller window."
        )


def check_fit(
    model: Any, rows: list[Row], feature_map: Any, exact_layers: int, budget: int | None, near: Near, length: int
) -> None:
    """ValueError for options that don't fit the model or the texts: one row is run, to find the layers to convert."""
    layers: dict[int, Seen] = {}
    with torch.no_grad(), watching(model, lambda i, seen: layers.update({i: seen})):
        run(model, rows[0])
    if not layers:
        raise ValueError(
            f"no layer of {type(model).__name__} calls an attention function over its whole input, so there is nothing "
            "to convert: its layers are sliding windows, cross-attention, or not attention."
        )
    if exact_layers > len(layers):
        raise ValueError(f"exact_layers must be 0 to {len(layers)}, as many as can be converted; got {exact_layers}.")
    size, least = next(model.parameters()).element_size(), 0
    for i, seen in layers.items():
        (h, g, d), e = heads_of(attention_layers(model)[i]), seen.v.shape[3]
        least += g * min(sum(near), length) * (d + e) * size
        if feature_map is not None:
            phi = made_map(feature_map, d, g)
            queries = sum(min(length_of(row), SAMPLED) for row in rows[: max(1, len(rows) - len(rows) // 4)]) * (h // g)
            if isinstance(phi, QueryClusters) and phi.num_features(d) > queries:
                raise ValueError(
                    f"{phi.num_features(d):,} clusters need as many queries or more, and these texts have {queries:,} per "
                    "head; take fewer features, or more texts."
                )
    if budget is not None and budget < least:
        raise ValueError(
            f"a budget of {budget:,} bytes is too small: windows and sinks alone take {least:,}. Choose a smaller window, "
            "or a larger budget."
        )


def rows_of(texts: Sequence[Any] | Tensor, tokenizer: Any, model: Any) -> list[Row]:
    """Each text as what the model is called with."""
    device = next(model.parameters()).device
    found: list[Row] = []
    for text in texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError("texts that are strings need a tokenizer: pass tokenizer=, or ids.")
            limit = getattr(model.config, "max_position_embeddings", None)
            cut = {"truncation": limit is not None, "max_length": limit}
            text = {"input_ids": tokenizer(text, return_tensors="pt", **cut).input_ids}
        elif isinstance(text, Tensor):
            text = {"input_ids": text[None]}
        found.append({name: x.to(device) for name, x in text.items()})
    if not found:
        raise ValueError("calibration needs texts: 32 to 128 of them; got none.")
    return found


def length_of(row: Row) -> int:
    """Tokens, or whatever its first tensor has along its second axis."""
    return next(iter(row.values())).shape[1]


def run(model: Any, row: Row) -> Any:
    options = {"use_cache": False} if model.can_generate() else {}
    return model(**row, **options)


class Check:
    """What a model loses: measured on rows that it was not calibrated on, against softmax attention."""

    def __init__(self, model: Any, rows: list[Row]):
        self.model, self.rows, self.generates = model, rows, model.can_generate()
        self.unit = "nats per token" if self.generates else "squared error of the last hidden state, relative"
        self.targets: list[Tensor] = []
        with watching(model, lambda i, seen: None):
            if not self.generates:
                with torch.no_grad():
                    self.targets = [run(model, row)[0] for row in rows]
            self.softmax = self.loss()

    @torch.no_grad()
    def loss(self) -> float:
        """Of the model with the attention that it runs now."""
        found = []
        for n, row in enumerate(self.rows):
            o = run(self.model, row)[0].float()
            if self.generates:
                ids = row["input_ids"]
                found.append(torch.nn.functional.cross_entropy(o[0, :-1], ids[0, 1:]).item())
            else:
                target = self.targets[n].float()
                found.append(((o - target).square().sum() / target.square().sum()).item())
        return sum(found) / len(found)

    def with_window(self, near: Near) -> float:
        """With window, sinks and slots alone in every layer."""

        def look(i: int, seen: Seen) -> Tensor:
            return hybrid_attention(
                seen.q, seen.k, seen.v, causal=seen.causal, scale=seen.scale, key_mask=seen.key_mask, **near._asdict()
            )

        with watching(self.model, look):
            return self.loss()

    def with_one_layer(self, layer: int) -> float:
        """With hybrid attention in this layer alone."""
        own: Any = child_of(attention_layers(self.model)[layer])
        near = {name: own.options[name] for name in Near._fields}

        def look(i: int, seen: Seen) -> Tensor | None:
            if i != layer:
                return None
            options = {"causal": seen.causal, "scale": seen.scale}
            return own(seen.q, seen.k, seen.v, key_mask=seen.key_mask, **options, **near)[0]

        with watching(self.model, look):
            return self.loss()


@torch.no_grad()
def gather(model: Any, rows: list[Row], feature_map: Any, near: Near) -> dict[int, Layer]:
    """The layers that the hybrid computes, each with its calibrated map and λ."""
    layers: dict[int, Layer] = {}
    if feature_map is None:
        with watching(model, lambda i, seen: layers.update({i: Layer(heads=shape_of(seen))})):
            run(model, rows[0])
        return dict(sorted(layers.items()))
    options = {"name": feature_map} if isinstance(feature_map, str) else dict(feature_map)
    name = options.pop("name")
    taken = options_of(name)
    implied: dict[str, Any] = {x: True for x in ("centre", "balance") if x in taken}

    def spread(i: int, seen: Seen) -> None:
        layers.setdefault(i, Layer()).see_spread(seen, full=name == "sderf")

    with watching(model, spread):
        for row in rows:
            run(model, row)
    for i, layer in layers.items():
        seed = {"seed": i} if "seed" in taken else {}
        _, g, d, _ = layer.heads
        layer.feature_map = phi = make(name, head_dim=d, num_heads=g, **{**seed, **implied, **options})
        if isinstance(phi, FittedMap) and phi.adapts:
            assert layer.spreads is not None
            phi.calibrate(*layer.spreads)
        if isinstance(phi, QueryClusters):
            phi.cluster(torch.cat(layer.queries_of_rows, 1))
    with watching(model, lambda i, seen: layers[i].see_gap(seen, near)):
        for row in rows[:8]:
            run(model, row)
    for layer in layers.values():
        layer.settle_bias()
    return dict(sorted(layers.items()))


def choose(
    model: Any, rows: list[Row], layers: dict[int, Layer], near: Near, length: int, *, always: bool = False
) -> list[LayerReport]:
    """Gives each layer its map, and each of its heads features where they have the smaller error on these rows, or `always`.

    length: how long these rows are, by and large.
    """
    reports = judge(model, rows, layers, near)
    for one in reports:
        phi = layers[one.layer].feature_map
        if always and phi is not None:
            for head in one.heads:
                head.mode = "features"
        set_options(
            model,
            layers=one.layer,
            **near._asdict(),
            feature_map=phi,
            mode=one.modes,
            far_bias=[x for head in one.heads for x in head.far_bias],
            far_until=None if phi is None else length,
        )
    return reports


@torch.no_grad()
def judge(model: Any, rows: list[Row], layers: dict[int, Layer], near: Near) -> list[LayerReport]:
    """What each head loses by each of its choices."""
    size, length = next(model.parameters()).element_size(), max(map(length_of, rows))
    wide = {i: wider(model, layer, near) for i, layer in layers.items()}
    with watching(model, lambda i, seen: layers[i].see_errors(seen, near, wide[i])):
        for row in rows:
            run(model, row)
    return [layer_report(i, layer, near, length, size) for i, layer in layers.items()]


def wider(model: Any, layer: Layer, near: Near) -> Near:
    """With a window that is larger by the bytes of a layer's features."""
    _, _, d, e = layer.heads
    size = next(model.parameters()).element_size()
    features = 0 if layer.feature_map is None else layer.feature_map.num_features(d)
    return near._replace(window=near.window + 4 * features * (e + 1) // ((d + e) * size))


def layer_report(number: int, layer: Layer, near: Near, length: int, size: int) -> LayerReport:
    h, g, d, e = layer.heads
    keep = min(sum(near), length) * (d + e) * size
    sums = {"window": keep, "exact": length * (d + e) * size}

    def grouped(x: Tensor) -> Tensor:
        return x.view(g, h // g).sum(1)

    norm = grouped(layer.norm)
    if layer.feature_map is None:
        error, share = ((grouped(layer.window) / norm).tolist(), grouped(layer.teacher_share) / (layer.rows * (h // g)))
        nothing = [0.0] * (h // g)
        heads = [HeadReport("window", None, error[j], None, 0.0, share[j].item(), nothing, sums) for j in range(g)]
        return LayerReport(number, heads)
    sums["features"] = keep + 4 * layer.feature_map.num_features(d) * (e + 1)
    best = layer.features.argmin(0)  # (h,): of TRUST
    query_heads = torch.arange(h, device=best.device)
    bias = layer.bias + torch.tensor(TRUST, device=best.device)[best]
    errors = [(grouped(x) / norm).tolist() for x in (layer.features[best, query_heads], layer.window, layer.wide)]
    shares = [
        (grouped(x) / (layer.rows * (h // g))).tolist()
        for x in (layer.far_share[best, query_heads], layer.teacher_share)
    ]
    heads = [
        HeadReport(
            "features" if errors[0][j] < min(errors[1][j], errors[2][j]) else "window",
            errors[0][j],
            errors[1][j],
            errors[2][j],
            shares[0][j],
            shares[1][j],
            bias.view(g, -1)[j].tolist(),
            sums,
        )
        for j in range(g)
    ]
    return LayerReport(number, heads)


def keep_layers(reports: list[LayerReport], number: int) -> None:
    """The layers whose conversion harms most become exact."""
    for one in sorted(reports, key=lambda x: -(x.harm or 0.0))[:number]:
        for head in one.heads:
            head.mode = "exact"


def keep_heads(reports: list[LayerReport], budget: int | None) -> None:
    """Heads become exact while the bytes suffice: by their share of the layer's harm for each byte that they cost."""
    if budget is None:
        return
    used = sum(head.bytes for one in reports for head in one.heads)
    with_sums = [head for one in reports for head in one.heads if head.mode == "features"]
    for head in sorted(with_sums, key=lambda x: x.error_window - x.error):  # those that gain least go first
        if used > budget:
            used, head.mode = used - head.bytes + head.bytes_of["window"], "window"
    if used > budget:
        raise ValueError(
            f"a budget of {budget:,} bytes is too small: windows, sinks and exact layers take {used:,}. Choose a smaller "
            "window or fewer exact layers, or a larger budget."
        )

    def worth(item: tuple[LayerReport, HeadReport]) -> float:
        one, head = item
        harm, total = max(one.harm or 0.0, 1e-9), sum(x.error for x in one.heads)
        return harm * head.error / max(total, 1e-12) / max(1, head.bytes_of["exact"] - head.bytes)

    for _, head in sorted(((one, head) for one in reports for head in one.heads), key=worth, reverse=True):
        extra = head.bytes_of["exact"] - head.bytes
        if used + extra <= budget:
            used, head.mode = used + extra, "exact"
