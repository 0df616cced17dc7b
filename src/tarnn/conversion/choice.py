"""Choose what each head computes after a conversion: features, its window alone, or softmax over all keys."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tarnn.conversion.calibration import FAR_BIAS_OFFSETS, ExactKeys, LayerStatistics
from tarnn.conversion.capture import capturing
from tarnn.conversion.options import set_options
from tarnn.conversion.report import HeadReport, LayerReport
from tarnn.conversion.rows import Row, length_of, run_model


def choose(
    model: PreTrainedModel,
    rows: Sequence[Row],
    layers: Mapping[int, LayerStatistics],
    keys: ExactKeys,
    length: int,
    *,
    always: bool = False,
) -> list[LayerReport]:
    """Give each layer its map, and each head features if its error on these rows is smaller with them, or `always`.

    length: queries from there on have no features.
    """
    reports = measure(model, rows, layers, keys)
    for report in reports:
        phi = layers[report.layer].feature_map
        if always and phi is not None:
            for head in report.heads:
                head.mode = "features"
        set_options(
            model,
            layers=report.layer,
            **keys._asdict(),
            feature_map=phi,
            mode=report.modes,
            far_bias=[x for head in report.heads for x in head.far_bias],
            far_until=None if phi is None else length,
        )
    return reports


@torch.no_grad()
def measure(
    model: PreTrainedModel, rows: Sequence[Row], layers: Mapping[int, LayerStatistics], keys: ExactKeys
) -> list[LayerReport]:
    """Measure the loss of each head for each of its choices."""
    size, length = next(model.parameters()).element_size(), max(map(length_of, rows))
    wide = {i: widened(keys, layer, size) for i, layer in layers.items()}
    with capturing(model, lambda i, inputs: layers[i].add_errors(inputs, keys, wide[i])):
        for row in rows:
            run_model(model, row)
    return [layer_report(i, layer, keys, length, size) for i, layer in layers.items()]


def widened(keys: ExactKeys, layer: LayerStatistics, size: int) -> ExactKeys:
    """A window that is larger by the bytes of a layer's features. size: bytes of a number."""
    features = 0 if layer.feature_map is None else layer.feature_map.num_features(layer.heads.d)
    d, e = layer.heads.d, layer.heads.e
    return keys._replace(window=keys.window + 4 * features * (e + 1) // ((d + e) * size))


def layer_report(number: int, layer: LayerStatistics, keys: ExactKeys, length: int, size: int) -> LayerReport:
    """The errors, shares and bytes of a layer's heads, with the smallest error's λ and the choice that follows."""
    h, g, d, e = layer.heads
    nearby = min(sum(keys), length) * (d + e) * size
    bytes_of = {"window": nearby, "exact": length * (d + e) * size}

    def per_head(x: Tensor) -> Tensor:
        return x.view(g, h // g).sum(1)

    norm, count = per_head(layer.norm), layer.rows * (h // g)
    window, teacher_share = (per_head(layer.window) / norm).tolist(), (per_head(layer.teacher_share) / count).tolist()
    errors: list[tuple[float, float]] = []  # with features, with the wide window
    shares, bias = [0.0] * g, torch.zeros(h)
    if layer.feature_map is not None:
        bytes_of["features"] = nearby + 4 * layer.feature_map.num_features(d) * (e + 1)
        best = layer.features.argmin(0)  # (h,): the offset of each query head
        query_heads = torch.arange(h, device=best.device)
        bias = layer.bias + torch.tensor(FAR_BIAS_OFFSETS, device=best.device)[best]
        features, wide = ((per_head(x) / norm).tolist() for x in (layer.features[best, query_heads], layer.wide))
        errors, shares = list(zip(features, wide)), (per_head(layer.far_share[best, query_heads]) / count).tolist()
    heads = []
    for j, far_bias in enumerate(bias.view(g, -1).tolist()):
        error, error_wide = errors[j] if errors else (None, None)
        better = error is not None and error_wide is not None and error < min(window[j], error_wide)
        mode = "features" if better else "window"
        heads.append(HeadReport(mode, error, window[j], error_wide, shares[j], teacher_share[j], far_bias, bytes_of))
    return LayerReport(number, heads)


def allocate_exact_layers(reports: Sequence[LayerReport], number: int) -> None:
    """Make the layers exact whose conversion harms most."""
    for report in sorted(reports, key=lambda x: -(x.harm or 0.0))[:number]:
        for head in report.heads:
            head.mode = "exact"


def allocate_exact_heads(reports: Sequence[LayerReport], budget: int) -> None:
    """Make heads exact while the bytes suffice: by their share of the layer's harm for each byte that they cost."""
    used = sum(head.bytes for report in reports for head in report.heads)
    with_sums = [head for report in reports for head in report.heads if head.mode == "features"]
    for head in sorted(with_sums, key=lambda x: x.error_window - x.error):  # those that gain least go first
        if used > budget:
            used, head.mode = used - head.bytes + head.bytes_of["window"], "window"
    if used > budget:
        raise ValueError(
            f"a budget of {budget:,} bytes is too small: windows, sinks and exact layers take {used:,}. Choose a smaller "
            "window or fewer exact layers, or a larger budget."
        )

    def worth(item: tuple[LayerReport, HeadReport]) -> float:
        report, head = item
        harm, total = max(report.harm or 0.0, 1e-9), sum(x.error for x in report.heads)
        return harm * head.error / max(total, 1e-12) / max(1, head.bytes_of["exact"] - head.bytes)

    for _, head in sorted(((x, head) for x in reports for head in x.heads), key=worth, reverse=True):
        extra = head.bytes_of["exact"] - head.bytes
        if used + extra <= budget:
            used, head.mode = used + extra, "exact"
