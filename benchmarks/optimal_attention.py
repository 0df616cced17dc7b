"""How far from the best that any attention could do: figure 3 of "Rethinking Attention with Performers".

    python benchmarks/optimal_attention.py           # five minutes; benchmarks/results/optimal_attention.{json,md,png}
    python benchmarks/optimal_attention.py --quick   # under a minute; runs/benchmarks/optimal_attention.{json,md,png}

A training step (forward, loss, backward) of one sequence of t tokens, by the model's attention: Performer (FAVOR+ with
256 features), softmax (torch's SDPA), and none, where each position sees its own value only: what the paper calls
"X (OPT)". The model is the paper's regular one in width, 8 heads, 512 wide, feed-forward 2048, vocabulary 256, with 2 of
its 6 layers, which are all alike; causal, float32, without dropout. The three take turns on the same tokens. What would
take too long, by a shorter length's time, is left out and listed. Correctness is checked first: with Performer attention,
loss and gradients are those of plain PyTorch. Choromanski et al. 2021 (arXiv 2009.14794), section 4.1.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import model_steps
import torch
from clock import Contender, Effort, Timing
from model_steps import Found, draw_tokens, step_call, table
from provenance import kernels, provenance, results_folder

from tarnn.models import TarnnConfig, TarnnForCausalLM

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
QUICK = {"lengths": [256, 1024], "layers": 1}
PATIENCE = 8.0  # seconds a step beyond which one must do
VOCABULARY = 256
RIVALS = {"performer": ("linear", 1), "softmax": ("softmax", 2), "none": ("none", 1)}  # attention, power of t
COLORS = {"performer": "#0072b2", "softmax": "#d55e00", "none": "#999999"}


def main() -> int:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    if wrong := model_steps.wrong(make_model("performer", options), draw_tokens(2, 70, VOCABULARY)):
        print(f"the check is red, so nothing is measured: {wrong}", file=sys.stderr)
        return 1
    found: Found = {}
    left_out: list[str] = []
    interrupted = False
    try:
        for t in sorted(set(options.lengths)):
            found[t] = measure(t, options, found, left_out)
            write(options, found, left_out)
    except KeyboardInterrupt:
        interrupted = True
    if found:
        print(*(options.out / f"optimal_attention.{x}" for x in ("json", "md", "png")), sep="\n")
    return 130 if interrupted else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="one layer, short; under a minute")
    add("--out", type=Path, help="folder; benchmarks/results for the whole run, else runs/benchmarks")
    add("--lengths", type=int, nargs="+", default=LENGTHS)
    add("--layers", type=int, default=2, help="6 are the paper's")
    add("--hidden-size", type=int, default=512)
    add("--features", type=int, default=256, help="m")
    add("--rivals", nargs="+", choices=RIVALS, default=tuple(RIVALS))
    add("--longest-call", type=float, default=60.0, help="seconds a step beyond which a model is left out")
    add("--threads", type=int, help="torch's own choice by default")
    whole = vars(parser.parse_args([]))
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args()
    chosen = {name for name, value in vars(options).items() if value != whole[name]}
    options.out = options.out or results_folder(whole=chosen <= {"threads"})
    return options


def make_model(name: str, options) -> TarnnForCausalLM:
    """The paper's regular model, in width: LayerNorm before each sublayer, GELU, positions added to the embedding."""
    torch.manual_seed(0)
    config = TarnnConfig(
        vocab_size=VOCABULARY, hidden_size=options.hidden_size, num_hidden_layers=options.layers,
        num_attention_heads=8, intermediate_size=4 * options.hidden_size, attention=RIVALS[name][0],
        feature_map="favor", feature_map_options={"favor": {"num_features": options.features}}, decay="none",
        position="sinusoidal", norm="layer", mlp="gelu", bias=True, qk_norm=False,
    )  # fmt: skip
    return TarnnForCausalLM(config).train()


def measure(t: int, options, found: Found, left_out: list[str]) -> dict[str, Timing]:
    """A timing for each model that does not take too long; for the others a line in `left_out`."""
    tokens = draw_tokens(1, t, VOCABULARY)
    contenders = {}
    for name in options.rivals:
        if why := too_long(name, t, found, options.longest_call):
            left_out.append(f"{name}, t = {t:,}: {why}")
            print(f"without {left_out[-1]}")
        else:
            contenders[name] = Contender(step_call(make_model(name, options), tokens), PATIENCE)
    return model_steps.measure(t, contenders, Effort(seconds_a_round=0, rounds=(3, 7), seconds=8))


def too_long(name: str, t: int, found: Found, longest: float) -> str:
    """Why not to try, or nothing: by the longest that was measured before."""
    known = [shorter for shorter, at in found.items() if name in at]
    if not known:
        return ""
    shorter = max(known)
    seconds = found[shorter][name].ms / 1000 * (t / shorter) ** RIVALS[name][1]
    return f"a step would take about {seconds:.0f} s, by t = {shorter:,}" if seconds > longest else ""


def report(facts: dict[str, Any], found: Found, rivals: list[str]) -> str:
    return "\n\n".join(
        (
            "# A training step against the best that attention could do",
            f"`{facts['command']}`",
            f"{facts['machine']['cpu']}, {facts['threads']} threads; torch {facts['versions']['torch']}. One sequence of t "
            f"tokens through {facts['layers']} layers of 8 heads, {facts['hidden_size']} wide, feed-forward "
            f"{4 * facts['hidden_size']}, causal, float32: forward, loss, backward. performer: FAVOR+ with "
            f"{facts['features']} features. none: a position sees its own value only, the paper's X (OPT). "
            f"Kernels: {facts['kernels']}. Medians, in turns; a time with * is of one step.",
            table(found, rivals, (("performer", "none"), ("softmax", "none"), ("softmax", "performer"))),
            "## Left out",
            "\n".join(f"* {line}" for line in facts["left_out"]) or "Nothing.",
        )
    )


def write(options, found: Found, left_out: list[str]) -> None:
    facts = {
        **provenance(), "kernels": kernels(), "layers": options.layers, "hidden_size": options.hidden_size,
        "features": options.features, "left_out": left_out,
    }  # fmt: skip
    results = {str(t): {name: asdict(x) for name, x in at.items()} for t, at in found.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "optimal_attention.json"
    path.write_text(json.dumps({**facts, "results": results}, indent=2, ensure_ascii=False) + "\n")
    path.with_suffix(".md").write_text(report(facts, found, options.rivals) + "\n")
    title = f"a training step of one sequence; {facts['machine']['cpu']}, {facts['threads']} threads"
    model_steps.plot(found, COLORS, path.with_suffix(".png"), title, memory_scale="log")


if __name__ == "__main__":
    sys.exit(main())
