"""What a converted model costs against the length: prefill, one token more, and the bytes of its cache.

    python experiments/pretrained_cost.py           # a quarter of an hour on one core
    python experiments/pretrained_cost.py --quick

A Llama with random weights and the layers of one of 100 million parameters (12 layers; 768 wide, 12 heads, 4 key/value
heads), softmax by torch's fused kernel with transformers' cache, and hybrid attention with the cache of constant size. Only
`--layers` of the twelve are run, since each costs the same; times and bytes are of those. A method drops out where the next
prefill would take more than --patience seconds.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.options import parse
from scripts.common.plots import BLUE, ORANGE, label, line, panels
from scripts.common.results import run
from scripts.common.tables import MIB, markdown, page
from tarnn.conversion import constant_cache, set_options
from tarnn.huggingface.versions import CACHE

COLORS = {"softmax": ORANGE, "hybrid": BLUE}
FULL = {
    "lengths": [2**n for n in range(10, 17)],
    "layers": 1,
    "hidden": 768,
    "heads": 12,
    "kv_heads": 4,
    "window": 256,
    "features": 128,
    "slots": 0,
    "tokens": 16,
    "patience": 40.0,
    "resume": False,
}
QUICK = {"lengths": [64, 128], "hidden": 64, "heads": 4, "kv_heads": 2, "window": 16, "features": 16, "tokens": 2}
ABOUT = {
    "tokens": "timed one by one after the prefill",
    "patience": "seconds that a prefill may take",
    "layers": "of the model's twelve",
    "resume": "go on where the results file ends",
}
WHAT = {"prefill_s": "Seconds of prefill", "token_ms": "Milliseconds per token", "bytes": "MiB of cache"}
Row = dict[str, Any]


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, about=ABOUT)
    return run(options, measure, facts=lambda _, found: {"crossover": crossovers(found)}, report=report, figure=figure)


def measure(options, found: dict[str, Row], keep) -> None:
    path = options.out / "pretrained_cost.json"
    if options.resume and path.exists():
        import json

        found.update(json.loads(path.read_text())["results"])
    for method in COLORS:
        model, last = model_of(options, method), None
        for length in options.lengths:
            name = f"{method}, {length}"
            growth = 0.0 if last is None else (length / last["length"]) ** (2 if method == "softmax" else 1)
            if last is not None and growth * last["prefill_s"] > options.patience:
                print(f"{name}: left out, about {growth * last['prefill_s']:.0f} s", flush=True)
                break
            if name not in found:
                found[name] = {"method": method, "length": length, **costs(options, model, method, length)}
                print(name, found[name], flush=True)
                keep()
            last = found[name]


def model_of(options, method: str):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000 if not options.quick else 99,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        intermediate_size=8 * options.hidden // 3,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=2 * max(options.lengths),
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    if method == "hybrid":
        model.set_attn_implementation("tarnn_hybrid")
        favor = {"name": "favor", "num_features": options.features}
        set_options(model, window=options.window, sinks=4, slots=options.slots, feature_map=favor)
    return model


@torch.no_grad()
def costs(options, model, method: str, length: int) -> Row:
    """Of one prompt of this length, and of single tokens behind it."""
    from transformers import DynamicCache

    cache = constant_cache(model) if method == "hybrid" else DynamicCache(config=model.config)
    ids = torch.randint(3, 99, (1, length + options.tokens))
    begun = time.perf_counter()
    model(ids[:, :length], **{CACHE: cache}, logits_to_keep=1)
    prefill, times = time.perf_counter() - begun, []
    for i in range(length, length + options.tokens):
        begun = time.perf_counter()
        model(ids[:, i : i + 1], **{CACHE: cache})
        times.append(1000 * (time.perf_counter() - begun))
    return {"prefill_s": prefill, "token_ms": statistics.median(times), "bytes": bytes_of(method, cache)}


def bytes_of(method: str, cache) -> int:
    if method == "hybrid":
        return sum(layer.state.nbytes for layer in cache.layers)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def crossovers(found: dict[str, Row]) -> dict[str, int | None]:
    """For each cost the shortest length from which on hybrid attention costs less, as far as both were measured."""
    by = {m: {x["length"]: x for x in found.values() if x["method"] == m} for m in COLORS}
    both = sorted(set(by["softmax"]) & set(by["hybrid"]))
    first: dict[str, int | None] = {}
    for what in WHAT:
        worse = [t for t in both if by["hybrid"][t][what] >= by["softmax"][t][what]]
        better = [t for t in both if t > max(worse, default=0)]
        first[what] = better[0] if better else None
    return first


def report(options, facts, found: dict[str, Row]) -> str:
    parts = []
    for what, title in WHAT.items():
        rows = []
        for length in options.lengths:
            cells = [found.get(f"{method}, {length}") for method in COLORS]
            unit = MIB if what == "bytes" else 1
            rows.append([f"{length:,}", *(None if x is None else f"{x[what] / unit:,.3g}" for x in cells)])
        at = facts["crossover"][what]
        says = (
            f"Hybrid costs less from {at:,} tokens on." if at else "Hybrid does not cost less at any length measured."
        )
        parts += [f"## {title}", markdown(["length", *COLORS], rows), says]
    return page(
        "What a converted model costs",
        f"{options.layers} of 12 layers of a Llama of 100 million parameters with random weights ({options.hidden} wide, "
        f"{options.heads} heads, {options.kv_heads} key/value heads), float32, {options.threads} threads, one prompt. "
        f"Hybrid: window {options.window}, 4 sinks, "
        f"{options.slots} slots, {options.features} positive random features. Softmax: torch's fused kernel.",
        *parts,
        "![time of a prompt, time of a token and bytes of the state, against length](pretrained_cost.png)",
    )


def figure(options, facts, found: dict[str, Row]):
    made, axes = panels(3)
    for axis, (what, title) in zip(axes, WHAT.items()):
        for method, color in COLORS.items():
            points = [
                (x["length"], x[what] / (MIB if what == "bytes" else 1))
                for x in found.values()
                if x["method"] == method
            ]
            line(axis, points, color, method)
        label(axis, "tokens", title, ticks=options.lengths)
    return made


if __name__ == "__main__":
    sys.exit(main())
