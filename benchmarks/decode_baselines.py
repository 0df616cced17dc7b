"""Decoding by the fused step, by llama.cpp and by ONNX Runtime: one token more of a model of Llama's shape, on one thread.

    python benchmarks/decode_baselines.py --python ENVIRONMENT/bin/python      # five minutes; benchmarks/results/

Random weights of equal shape and bits, batch 1, behind 128 and 8,192 tokens; caches in float32 (llama.cpp: float16, its own
choice; tarnn also with bfloat16). ENVIRONMENT has `llama-cpp-python` and `gguf`, or `onnx` and `onnxruntime`, or all of them;
what is missing is named and left out. Each engine runs in a process of its own. int8 and int4 are the engines' own: Q8_0 and
Q4_0, MatMulNBits with groups of 32 and bytes as activations. The linear model has the same shape and no cache.
Models of other families, beside transformers: `one_call.py`.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.model_steps import wrong_token

from scripts.common.decode_cost import decode_cost
from scripts.common.options import parse
from scripts.common.others import taken_quietly
from scripts.common.results import run
from scripts.common.tables import bullets, markdown, page, source
from scripts.common.targets import GUARANTEE
from tarnn.decoding.fused import FusedStep
from tarnn.kernels.cpu.products import FORMATS
from tarnn.models import TarnnConfig, TarnnForCausalLM

FULL = {
    "python": Path(sys.executable),
    "positions": [128, 8192],
    "hidden": 512,
    "layers": 8,
    "heads": 8,
    "kv_heads": 8,
    "inner": 1408,
    "vocab": 257,
    "tokens": 32,
}
QUICK = {"positions": [16], "hidden": 64, "layers": 1, "heads": 2, "kv_heads": 1, "inner": 96, "tokens": 2}
ABOUT = {"python": "the interpreter of the environment that has the baselines", "tokens": "timed one by one"}
OURS = {  # attention, type of the cache
    "tarnn, softmax": ("softmax", None),
    "tarnn, softmax, cache in bfloat16": ("softmax", torch.bfloat16),
    "tarnn, linear": ("linear", None),
}
BASELINES = ("llama.cpp", "onnxruntime")
UNSUPPORTED = {("onnxruntime", "bfloat16"): "it has no bfloat16 products on a CPU"}
Found = dict[str, dict[str, Any]]  # by engine and weights: milliseconds by position, or why there are none


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, about=ABOUT)
    return run(options, measure, check=lambda options: wrong_token(make(options, "softmax"), 1), report=report)


def measure(options, found: Found, keep: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    for engine, (attention, cache_dtype) in OURS.items():
        model = make(options, attention)
        for weights in FORMATS:
            step = FusedStep(model, weights)
            cost = partial(decode_cost, model, step=step, rounds=5, seconds_a_round=0.1, cache_dtype=cache_dtype)
            ms = {str(n): taken_quietly(partial(cost, n))[0].ms for n in options.positions}
            found[f"{engine}: {weights}"] = {"engine": engine, "weights": weights, "ms": ms}
            keep()
    for engine in BASELINES:
        for weights in FORMATS:
            found[f"{engine}: {weights}"] = {"engine": engine, "weights": weights, **baseline(options, engine, weights)}
            keep()


def make(options, attention: str) -> TarnnForCausalLM:
    torch.manual_seed(0)
    return TarnnForCausalLM(
        TarnnConfig(
            vocab_size=options.vocab,
            hidden_size=options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.kv_heads,
            intermediate_size=options.inner,
            attention=attention,
            qk_norm=False,
            **({"position": "rotary"} if attention == "softmax" else {}),
        )
    ).eval()


def baseline(options, engine: str, weights: str) -> dict[str, Any]:
    """What `decode_workers.py` measured, or why it could not."""
    if why := UNSUPPORTED.get((engine, weights)):
        return {"missing": why}
    shape = {name: getattr(options, name) for name in ("hidden", "layers", "heads", "kv_heads", "inner", "vocab")}
    given = {
        "engine": engine,
        "weights": weights,
        "positions": options.positions,
        "tokens": options.tokens,
        "shape": shape,
    }
    worker = Path(__file__).parent / "toolkit" / "decode_workers.py"
    command = [str(options.python), str(worker), json.dumps(given)]
    done, _ = taken_quietly(partial(subprocess.run, command, capture_output=True, text=True))
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    return {"missing": (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]}


def report(options, facts: dict[str, Any], found: Found) -> str:
    there = [x for x in found.values() if "ms" in x]
    rows = [
        [
            x["engine"] + (f" {x['version']}" if "version" in x else ""),
            x["weights"],
            *(f"{ms:.2f}" for ms in x["ms"].values()),
        ]
        for x in there
    ]
    missing = [f"{x['engine']}, {x['weights']}: {x['missing']}" for x in found.values() if "missing" in x]
    shape = (
        f"{options.layers} layers, {options.hidden} wide, {options.heads} heads, {options.kv_heads} of keys and values"
    )
    return page(
        "One token more, beside llama.cpp and ONNX Runtime",
        source(facts, f"{shape}; random weights, one thread, batch 1."),
        GUARANTEE,
        markdown(["", "weights", *(f"behind {n:,} tokens, ms" for n in options.positions)], rows, left=2),
        "## Left out" if missing else "",
        bullets(missing) if missing else "",
    )


if __name__ == "__main__":
    sys.exit(main())
