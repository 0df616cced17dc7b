"""Convert a pretrained model to hybrid attention: for each layer a map, for each head λ and what it computes."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tarnn.conversion.calibration import ExactKeys, calibrate
from tarnn.conversion.choice import allocate_exact_heads, allocate_exact_layers, choose, widened
from tarnn.conversion.held_out_loss import HeldOutLoss
from tarnn.conversion.options import HYBRID, check_whole_number, set_options
from tarnn.conversion.report import LayerReport, Report
from tarnn.conversion.rows import length_of, rows_of
from tarnn.log import Log, silent


def convert(
    model: PreTrainedModel,
    texts: Sequence[Any] | Tensor,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    window: int = 256,
    sinks: int = 4,
    slots: int = 0,
    feature_map: str | Mapping[str, Any] | None = "clusters",
    mode: str = "choose",
    exact_layers: int = 0,
    budget: int | None = None,
    report: Log = silent,
) -> Report:
    """Give each layer of a model of transformers hybrid attention, calibrated on some texts; change the model in place.

    Calibrated per key/value head: the map's centre, balance and A; per query head λ (far bias). A head estimates far keys
    by features if its output then has a smaller error, on these texts, than with window and sinks alone and than with a
    window that is larger by the bytes of the features; otherwise it has its window and sinks alone. So have all heads if
    the model as a whole loses more with the features than without, and all queries further from the start than the texts
    reach.

    Args:
        texts: 32 to 128 of them, as long as the model will meet (features mean nothing beyond the length that a quarter
            of them reach): strings (with a tokenizer), ids (n, t) or a list of ids (t,), or dicts of what the model is
            called with. A quarter is held out to measure what the model loses.
        window, sinks, slots: keys that are exact; slots (causal models only) hold those that features approximate worst.
        feature_map: a name or {"name": …, options}. Clusters are those of the texts' queries; estimates of softmax's kernel
            function (oprf, favor …) are centred and balanced. None: window and sinks alone.
        mode: "choose", or "features": every head has them, whatever it loses (to train them, or to use them together with
            slots, which the choice leaves out).
        exact_layers: at most so many layers stay softmax attention: those whose conversion alone harms the loss most.
        budget: bytes of keys, values and sums for one sequence of the texts' length; key/value heads become exact while the
            bytes suffice, first those whose error, times the harm of their layer, is largest.
        report: called with lines about progress.

    Returns what was measured; `model.save_pretrained(…)` keeps the rest. Raises ValueError for a model without an
    attention interface, for options out of range, for texts no longer than window + sinks; all of that before the texts are
    looked at; and for a budget that is too small.
    """
    check_options(window, sinks, slots, mode, exact_layers, budget)
    rows = rows_of(texts, tokenizer, model)
    num_held_out = max(1, len(rows) // 4) if len(rows) > 1 else 0
    calibration, keys = rows[: len(rows) - num_held_out], ExactKeys(window, sinks, slots)
    lengths = sorted(map(length_of, calibration), reverse=True)
    length = lengths[(len(lengths) - 1) // 4]  # that a quarter of the texts reach
    check_length(length, keys, "a quarter of the texts")
    model.eval()
    held_out = HeldOutLoss(model, rows[len(calibration) :] or rows)
    report("queries and keys of each layer")
    layers = calibrate(model, calibration, feature_map, keys)
    report("output errors of each head")
    reports = choose(model, calibration, layers, keys, length, always=mode == "features")
    model.set_attn_implementation(HYBRID)
    alone, wide_window, wide_alone = held_out.with_window(keys), None, None
    if feature_map is not None:
        size = next(model.parameters()).element_size()
        wide_window = max(widened(keys, layer, size).window for layer in layers.values())
        wide_alone = held_out.with_window(keys._replace(window=wide_window))
        if mode == "choose" and held_out.loss() > max(alone, held_out.softmax):
            report("together the features lose more than window and sinks alone: no head has them")
            for layer in reports:
                for head in layer.heads:
                    head.mode = "window"
            set_modes(model, reports)
    if exact_layers or budget is not None:
        report(f"the harm of each of {len(reports)} layers")
        for layer in reports:
            layer.harm = held_out.with_one_layer(layer.layer) - held_out.softmax
        allocate_exact_layers(reports, exact_layers)
        if budget is not None:
            allocate_exact_heads(reports, budget)
        set_modes(model, reports)
    report("what the model loses")
    chosen = {"feature_map": feature_map, "mode": mode, "exact_layers": exact_layers, "budget": budget}
    return Report(
        options=keys._asdict() | chosen,
        texts=len(calibration),
        check_texts=len(held_out.rows),
        length=length,
        unit=held_out.unit,
        softmax=held_out.softmax,
        hybrid=held_out.loss(),
        layers=reports,
        window_alone=alone,
        wide_window=wide_window,
        wide_alone=wide_alone,
    )


def set_modes(model: PreTrainedModel, reports: Sequence[LayerReport]) -> None:
    """Set what the heads of each layer compute."""
    for report in reports:
        set_options(model, layers=report.layer, mode=report.modes)


def check_options(window: int, sinks: int, slots: int, mode: str, exact_layers: int, budget: int | None) -> None:
    """Raise ValueError for options that are out of range for any model."""
    check_whole_number("window", window, 1)
    for name, value in {"sinks": sinks, "slots": slots, "exact_layers": exact_layers}.items():
        check_whole_number(name, value, 0)
    if budget is not None:
        check_whole_number("budget", budget, 1)
    if mode not in ("choose", "features"):
        raise ValueError(f"mode must be choose or features; got {mode!r}.")


def check_length(length: int, keys: ExactKeys, which: str = "texts") -> None:
    """Raise ValueError for rows in which nothing is far."""
    if length <= keys.window + keys.sinks:
        raise ValueError(
            f"{which} must be longer than window + sinks = {keys.window + keys.sinks} tokens, or nothing is far; got "
            f"{length:,} tokens. Take longer ones, or a smaller window."
        )
