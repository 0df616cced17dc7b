"""Linear, hybrid or softmax? Small models of one text, by kind of attention, learning rate and width; and their speed.

    python experiments/choosing.py                # about an hour on one core; goes on where it was stopped

Each cell is one run of `tarnn train` on Python's own documentation, 1,000 steps of 4 × 256 bytes, one seed: bits per byte of
the last tenth. The speed is that of the same command on its own, two threads, from step 10 to step 30.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.options import ROOT, parse
from scripts.common.results import run
from scripts.common.tables import markdown, page

ATTENTION = {
    "linear, a decay per token": [],
    "hybrid, one softmax layer in four": ["--attention", "linear,linear,linear,softmax"],
    "softmax, rotary positions": ["--attention", "softmax", "--position", "rotary"],
}
RATES = (1e-3, 3e-3, 1e-2)
WIDTHS = (64, 128, 256)
WIDTH, RATE = 128, 3e-3


def main() -> int:
    return run(
        parse(
            __file__,
            __doc__,
            {"steps": 1000, "speed_steps": 30, "runs": ROOT / "runs" / "choosing", "threads": 1},
            {"steps": 2, "speed_steps": 0},
            about={"runs": "folder of the training runs; finished ones are read"},
        ),
        measure,
        report=report,
    )


def measure(options, results: dict[str, dict], keep) -> None:
    quality, speed = results.setdefault("quality", {}), results.setdefault("speed", {})
    cells = [(kind, WIDTH, rate) for rate in RATES for kind in ATTENTION]
    cells += [(next(iter(ATTENTION)), width, RATE) for width in WIDTHS if width != WIDTH]
    cells += [(next(iter(ATTENTION)), WIDTHS[-1], RATES[0])]
    for kind, width, rate in cells:
        name = f"{kind}; {width}; {rate:g}"
        if name not in quality:
            folder = options.runs / f"{kind.split(',')[0]}_{width}_{rate:g}"
            log = train(folder, kind, width, rate, options.steps, threads=1)
            facts = json.loads((folder / "settings.json").read_text())
            quality[name] = {
                "bits_per_byte": log[-1]["validation_bits_per_byte"],
                "parameters": facts["run"]["parameters"],
            }
            keep()
    for kind, width in [(kind, WIDTH) for kind in ATTENTION] + [(next(iter(ATTENTION)), w) for w in WIDTHS]:
        name = f"{kind}; {width}"
        if options.speed_steps and name not in speed:
            folder = options.runs / f"speed_{kind.split(',')[0]}_{width}"
            log = train(folder, kind, width, RATE, options.speed_steps, threads=2)
            first, last = (next(x for x in log if x["step"] == s and "loss" in x) for s in (10, options.speed_steps))
            speed[name] = (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])
            keep()


def train(folder: Path, kind: str, width: int, rate: float, steps: int, *, threads: int) -> list[dict]:
    """The log of that run, which is made unless it is there."""
    log = folder / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if not lines or lines[-1]["step"] < steps or "validation_bits_per_byte" not in lines[-1]:
        lengths = f"--steps {steps} --eval-every {steps} --save-every {max(steps, 10)} --sample-tokens 0 --context 256"
        sizes = f"--batch-size 4 --hidden-size {width} --layers 4 --heads 4 --learning-rate {rate}"
        words = [*lengths.split(), *sizes.split(), *map(str, ATTENTION[kind])]
        subprocess.run(
            [sys.executable, "-m", "tarnn", "train", "python-docs", "--out", str(folder), "--overwrite", *words],
            check=True,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    return lines


def report(options, facts, results) -> str:
    quality, speed = results["quality"], results.get("speed", {})

    def bits(kind: str, width: int, rate: float) -> str:
        found = quality.get(f"{kind}; {width}; {rate:g}")
        return f"{found['bits_per_byte']:.3f}" if found else "–"

    by_rate = markdown(
        ["width 128", *(f"learning rate {rate:g}" for rate in RATES), "tokens per second"],
        [
            [kind, *(bits(kind, WIDTH, rate) for rate in RATES), f"{speed.get(f'{kind}; {WIDTH}', 0):,.0f}"]
            for kind in ATTENTION
        ],
    )
    linear = next(iter(ATTENTION))
    sizes = {width: quality.get(f"{linear}; {width}; {RATE:g}", {}).get("parameters", 0) for width in WIDTHS}
    by_width = markdown(
        ["linear, width", "parameters", *(f"learning rate {rate:g}" for rate in RATES[:2]), "tokens per second"],
        [
            [
                width,
                f"{sizes[width]:,}",
                *(bits(linear, width, rate) for rate in RATES[:2]),
                f"{speed.get(f'{linear}; {width}', 0):,.0f}",
            ]
            for width in WIDTHS
        ],
    )
    about = f"Bits per byte after {options.steps:,} steps of 4 × 256 bytes; 4 layers of 4 heads; one seed."
    return page("Linear, hybrid or softmax", about, by_rate, by_width)


if __name__ == "__main__":
    raise SystemExit(main())
