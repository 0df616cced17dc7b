"""A converted model on texts longer than those that it was calibrated on, beside window and sinks alone.

    python experiments/beyond_calibration.py --data FOLDER          # stories260k in it; ten minutes on one core
    python experiments/beyond_calibration.py --data FOLDER --quick

stories260K is converted on its own stories, cut to some lengths (window and sinks a quarter of it), and reads others of 512
tokens: one, two and four times as long. Compared: window and sinks alone; a window of equal bytes alone; features where
`convert` chooses them; features in all heads; and the same without their end (`far_until=None`), which is what calibration on
short texts does where nothing bounds it. Each row is the mean over --seeds draws of clusters, with an interval over stories.
"""

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from pretrained import SINKS, equal_bytes, nats, own_stories

from scripts.common.options import parse
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, page
from tarnn.conversion import convert, set_options

FULL = {"lengths": [128, 256], "seeds": 3, "calibrate": 24, "rows": 40, "features": 64, "data": Path}
QUICK = {"lengths": [64], "seeds": 1, "calibrate": 4, "rows": 2, "features": 8}
ABOUT = {
    "data": "the folder of stories260k",
    "lengths": "tokens of the calibration's texts",
    "calibrate": "texts that calibrate",
    "rows": "stories that measure",
}
Row = dict[str, Any]


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, about=ABOUT)
    return run(options, measure, report=report)


def measure(options, found: dict[str, Row], keep) -> None:
    if options.data is None:
        raise Unmeasured("--data names the folder of the shared data")
    warnings.filterwarnings("ignore", "this model's features were calibrated")  # that is what is measured
    base, texts, test = own_stories(options)
    softmax = nats(base, test)
    d = base.config.hidden_size // base.config.num_attention_heads
    for length in options.lengths:
        window = length // 4 - SINKS
        wide = window + equal_bytes(options.features, d)
        losses = {
            "window and sinks alone": [alone(base, window, test)],
            f"a window of {wide} alone (equal bytes)": [alone(base, wide, test)],
        }
        for seed in range(options.seeds):
            for name, mode in {"chosen": "choose", "in all heads": "features"}.items():
                phi = {"name": "clusters", "num_features": options.features, "seed": seed}
                model = copy.deepcopy(base)
                made = convert(model, texts[:, :length], window=window, sinks=SINKS, feature_map=phi, mode=mode)
                count = sum(head.mode == "features" for layer in made.layers for head in layer.heads)
                print(f"calibrated on {length}, seed {seed}, features {name}: in {count} heads", flush=True)
                losses.setdefault(f"features {name}", []).append(nats(model, test))
                if mode == "features":
                    set_options(model, far_until=None)
                    losses.setdefault(f"features {name}, without an end", []).append(nats(model, test))
        for name, of_seeds in losses.items():
            more = torch.stack(of_seeds).mean(0) - softmax
            found[f"{length}, {name}"] = {"length": length, "window": window, **by_length(more, length)}
            print(f"{length}, {name}", found[f"{length}, {name}"], flush=True)
        keep()


def alone(base, window: int, test: Tensor) -> Tensor:
    model = copy.deepcopy(base)
    model.set_attn_implementation("tarnn_hybrid")
    set_options(model, window=window, sinks=SINKS, mode="window", feature_map=None)
    return nats(model, test)


def by_length(more: Tensor, length: int) -> Row:
    """Nats per token more than softmax, up to the calibration's length, to twice, and to four times as much."""
    draws = torch.randint(len(more), (1000, len(more)), generator=torch.Generator().manual_seed(0))
    row = {}
    for start, stop in ((0, 1), (1, 2), (2, 4)):
        means = more[:, start * length : stop * length].mean(-1)
        if means.isnan().any():
            continue  # the stories end before
        low, high = means[draws].mean(-1).quantile(torch.tensor([0.025, 0.975])).tolist()
        row[f"{start}× … {stop}×"] = [means.mean().item(), low, high]
    return row


def report(options, facts, found: dict[str, Row]) -> str:
    parts = [f"`{facts['command']}`; {facts['machine']['cpu']}, {facts['threads']} threads."]
    parts.append(
        "stories260K, nats per token more than softmax attention (95 % interval over stories), by the position in multiples "
        "of the calibration's length."
    )
    for length in options.lengths:
        rows = {name.split(", ", 1)[1]: x for name, x in found.items() if x["length"] == length}
        if not rows:
            continue
        bins = [name for name in next(iter(rows.values())) if "×" in name]
        lines = [[name, *("{:+.4f} ({:+.4f} … {:+.4f})".format(*x[b]) for b in bins)] for name, x in rows.items()]
        window = next(iter(rows.values()))["window"]
        parts.append(
            f"## Calibrated on {length} tokens: window {window}, {SINKS} sinks\n\n{markdown(['far keys', *bins], lines)}"
        )
    return page("A converted model beyond its calibration", *parts)


if __name__ == "__main__":
    sys.exit(main())
