"""From a cold start to the first token, and what a second text costs: a folder in bfloat16, each in a process of its own.

    python benchmarks/first_token.py --threads 1      # four minutes; benchmarks/results/first_token.{json,md}

Hoped for: a folder in bfloat16 is at its first token before transformers is, in less memory, and `generate` of a live model in
bfloat16 writes its second short text at least four times as fast as `forward`, as its weights are packed once. A model of
Qwen3.5's shape with random weights, of about 100 million (`one_call.py`); files in the page cache; a prompt of 16 tokens. Seconds
count from the start of the process, imports included. Memory is the most that the process held until then, with the pages of the
folder that it mapped; what was its own, of no file, at the first token; and the most until the second text was written. The
growth from the imports to the first token, in sizes of the folder, says whether the weights were ever held in float32: such a
copy alone takes two, beside one for the pages of the folder and one for packed bfloat16.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as hf

sys.path.insert(0, str(Path(__file__).parents[1]))
from one_call import COMMON, FAMILIES

from scripts.common.options import ROOT, parse
from scripts.common.others import taken_quietly
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, mebibytes, page, source
from scripts.common.targets import Target, at_least, at_most, section

FULL = {"layers": 12, "tokens": 32, "rounds": 3}
QUICK = {"layers": 4, "tokens": 4, "rounds": 1}
THEIRS, PATCHED, FORWARD = "transformers", "live, patched", "live, patched: forward alone"
FOLDER, ANEW = "folder, bfloat16", "live, patched: packing each time"
WAYS: dict[str, dict[str, Any]] = {
    FOLDER: {"by": "tarnn", "weights": "bfloat16"},
    "folder, int8": {"by": "tarnn", "weights": "int8"},
    "folder, int4": {"by": "tarnn", "weights": "int4"},
    THEIRS: {"by": "transformers"},
    FORWARD: {"by": "patched", "weights": None},
    ANEW: {"by": "patched", "forgets": True},
    PATCHED: {"by": "patched"},
    "live, patched: int8": {"by": "patched", "weights": "int8"},
}
WORKER = ROOT / "benchmarks" / "toolkit" / "first_token_worker.py"
FASTER = 4.0
FEWEST = 1.2  # times as fast as where each text packs the weights
MOST = 2.5  # sizes of the folder


def main() -> int:
    return run(parse(__file__, __doc__, FULL, QUICK), measure, report=report)


def folder_of(options, folder: str) -> str:
    """Write a model with random weights in bfloat16."""
    torch.manual_seed(0)
    config = FAMILIES["Qwen3.5"](options.layers)
    hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def measure(options, results: dict[str, Any], keep) -> None:
    with TemporaryDirectory() as name:
        folder = folder_of(options, name)
        results["bytes"] = (Path(folder) / "model.safetensors").stat().st_size
        rounds, _ = taken_quietly(lambda: [{x: once(x, folder, options) for x in WAYS} for _ in range(options.rounds)])
    ways = {x: {key: median(y[x][key] for y in rounds) for key in rounds[0][x]} for x in WAYS}
    for x in ways.values():
        x["folders"] = (x["peak_bytes"] - x["imported_bytes"]) / results["bytes"]
    results["ways"] = ways
    keep()


def once(way: str, folder: str, options) -> dict[str, float]:
    """Return what a process of one way says."""
    sizes = {"threads": options.threads, "vocabulary": COMMON["vocab_size"], "tokens": options.tokens}
    given = json.dumps({"folder": folder, **sizes, **WAYS[way], "begun": time.time()})
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(WORKER), given]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        raise Unmeasured(f"{way}: {done.stderr.strip()[-300:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{way:32}" + "".join(f"  {key} {x:,.1f}" for key, x in found.items()), flush=True)
    return found


def targets(ways: dict[str, Any]) -> list[Target]:
    first = {x: ways[THEIRS]["first_token_s"] / ways[x]["first_token_s"] for x in WAYS if x.startswith("folder")}
    memory = {x: ways[THEIRS]["peak_bytes"] / ways[x]["peak_bytes"] for x in WAYS if x.startswith("folder")}
    second = {x: ways[x]["second_turn_ms"] / ways[PATCHED]["second_turn_ms"] for x in (FORWARD, ANEW)}
    in_16_bits = {x: ways[x]["folders"] for x in (FOLDER, PATCHED)}
    return [
        at_least("a folder is at its first token before transformers", "cold start", 1.0, first),
        at_least("a folder takes less memory than transformers", "cold start", 1.0, memory),
        at_most("no float32 copy: growth until the first token, in sizes of the folder", "bfloat16", MOST, in_16_bits),
        at_least("the second text of a live model, against `forward`", "bfloat16", FASTER, {FORWARD: second[FORWARD]}),
        at_least("the second text of a live model, against packing", "bfloat16", FEWEST, {ANEW: second[ANEW]}),
    ]


def report(options, facts: dict[str, Any], results: dict[str, Any]) -> str:
    rows = []
    for way, x in results["ways"].items():
        times = [f"{x['first_token_s']:.2f}", *(f"{x[key]:,.0f}" for key in ("first_turn_ms", "second_turn_ms"))]
        sizes = [mebibytes(x[key], 0) for key in ("peak_bytes", "own_bytes", "peak_after_turns")]
        rows.append([way, *times, f"{x['token_ms']:.1f}", *sizes, f"{x['folders']:.2f}"])
    columns = (
        "way | first token, s | a text, ms | the next one, ms | a token, ms | at most, MiB | its own, MiB | behind both | "
        "growth, in folders"
    )
    about = f"The folder has {mebibytes(results['bytes'], 0)} MiB. A text: {options.tokens} tokens behind 16."
    table = markdown(columns, rows)
    return page("First tokens", source(facts, about), section(targets(results["ways"])), table)


if __name__ == "__main__":
    sys.exit(main())
