"""Tokens per second on a GPU: a model of linear attention, and one of softmax with transformers' cache, by position.

    python benchmarks/gpu_decode.py            # a few minutes on a GPU; benchmarks/results/gpu_decode.{json,md}
    python benchmarks/gpu_decode.py --dry-run  # seconds on a CPU: does the script run?

The same sizes, bfloat16, random weights, one token for each row of a batch. Ours is recorded in a CUDA graph; the baseline is
Llama of transformers with a static cache, whose places are all read at each token. Without a GPU the page says so.
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.gpu_clock import ROUNDS, WARM_UP, about, gpu, milliseconds, where

from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page
from tarnn.decoding.cuda_graph import RecordedStep
from tarnn.decoding.loop import TokenLoop
from tarnn.models import TarnnConfig, TarnnForCausalLM

FULL = {"batch_sizes": [1, 32, 256], "positions": [1024, 4096, 16384, 65536, 131072], "dry_run": False}
DRY = {"batch_sizes": [2], "positions": [8]}
ROOM = WARM_UP + ROUNDS + 1  # the cache counts its tokens, whatever position it is given: as many calls fit
QUICK = {"batch_sizes": [1], "positions": [1024]}
SHAPE = {"num_hidden_layers": 8, "num_attention_heads": 8, "hidden_size": 512, "vocab_size": 257}


def linear_step(batch_size: int, device: str) -> Any:
    """One token, as the token loop takes it: recorded in a CUDA graph. Its cost is that of any position."""
    model = TarnnForCausalLM(TarnnConfig(**SHAPE)).to(device, torch.bfloat16).eval()
    tokens = torch.zeros(batch_size, dtype=torch.long, device=device)
    loop = TokenLoop(model, model.new_state(batch_size))
    step = RecordedStep(loop.model, loop.state) if device == "cuda" else torch.no_grad()(model.step)
    return lambda: step(tokens, loop.state, inplace=True)


def softmax_step(batch_size: int, device: str, position: int) -> Any:
    """One token of transformers' Llama, behind a full cache."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    from tarnn.huggingface.versions import CACHE

    heads = SHAPE["num_attention_heads"]
    config = LlamaConfig(
        **SHAPE,
        num_key_value_heads=heads,
        intermediate_size=4 * SHAPE["hidden_size"],
        max_position_embeddings=position + ROOM,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    cache = StaticCache(config=config, max_cache_len=position + ROOM)
    tokens = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    place = torch.tensor([position], device=device)

    def step():
        with torch.no_grad():
            model(input_ids=tokens, **{CACHE: cache}, cache_position=place, use_cache=True)

    return step


def tokens_per_second(batch_size: int, device: str | None, make, *sizes: int) -> float | None:
    """None where memory doesn't suffice."""
    if device is None:
        return None
    try:
        return batch_size / (milliseconds(make(batch_size, device, *sizes), device) * 1e-3)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def measure(options, results: dict[str, list[dict[str, Any]]], keep) -> None:
    rows, device = results.setdefault("steps", []), where(options)
    sizes = DRY if options.dry_run else vars(options)
    for batch_size in sizes["batch_sizes"]:
        ours = tokens_per_second(batch_size, device, linear_step)
        for position in sizes["positions"]:
            theirs = tokens_per_second(batch_size, device, softmax_step, position)
            rows.append({"batch_size": batch_size, "position": position, "linear": ours, "softmax": theirs})
            keep()


def report(options, facts: dict[str, Any], results: dict[str, list[dict[str, Any]]]) -> str:
    number = lambda x: None if x is None else f"{x:,.0f}"  # noqa: E731
    rows = [[x["batch_size"], x["position"], number(x["linear"]), number(x["softmax"])] for x in results["steps"]]
    return page(
        "Tokens per second on a GPU",
        about(options),
        f"`{facts['command']}`. {SHAPE}, bfloat16. A dash: not measured, or more than the GPU's memory.",
        markdown(["batch", "position", "linear attention", "softmax, transformers' cache"], rows, left=2),
    )


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK)
    return run(options, measure, report=report, facts=lambda options, results: {"gpu": gpu()})


if __name__ == "__main__":
    raise SystemExit(main())
