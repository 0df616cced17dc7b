"""Tokens per second on a GPU: a model of linear attention, and one of softmax with transformers' cache, by position.

    python benchmarks/gpu_decode.py            # a few minutes on a GPU; benchmarks/results/gpu_decode.{json,md}

The same sizes, bfloat16, random weights, one token for each row of a batch. Ours is recorded in a CUDA graph; the baseline is
Llama of transformers with a static cache, of which all places up to the position are read. Without a GPU the page says so.
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu_clock import gpu, milliseconds

from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page
from tarnn.models import TarnnConfig, TarnnForCausalLM

FULL = {"batch_sizes": [1, 32, 256], "positions": [1024, 4096, 16384, 65536, 131072]}
QUICK = {"batch_sizes": [1], "positions": [1024]}
SHAPE = {"num_hidden_layers": 8, "num_attention_heads": 8, "hidden_size": 512, "vocab_size": 257}


def linear_step(batch_size: int) -> Any:
    """One token by a CUDA graph. Its cost is that of any position."""
    model = TarnnForCausalLM(TarnnConfig(**SHAPE)).to("cuda", torch.bfloat16).eval()
    tokens = torch.zeros(batch_size, dtype=torch.long, device="cuda")
    state = model.new_state(batch_size)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model.step(tokens, state)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, after = model.step(tokens, state)
            for x, y in zip(state.tensors().values(), after.tensors().values()):
                if x is not y:
                    x.copy_(y)
    return graph.replay


def softmax_step(batch_size: int, position: int) -> Any:
    """One token of transformers' Llama, behind a full cache."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    heads = SHAPE["num_attention_heads"]
    config = LlamaConfig(
        **SHAPE,
        num_key_value_heads=heads,
        intermediate_size=4 * SHAPE["hidden_size"],
        max_position_embeddings=position + 1,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    cache = StaticCache(config=config, max_cache_len=position + 1)
    tokens = torch.zeros(batch_size, 1, dtype=torch.long, device="cuda")
    place = torch.tensor([position], device="cuda")

    def step():
        with torch.no_grad():
            model(input_ids=tokens, past_key_values=cache, cache_position=place, use_cache=True)

    return step


def tokens_per_second(batch_size: int, make, *sizes: int) -> float | None:
    """None where memory doesn't suffice."""
    try:
        return batch_size / (milliseconds(make(batch_size, *sizes)) * 1e-3)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def measure(options, results: dict[str, list[dict[str, Any]]], keep) -> None:
    rows = results.setdefault("steps", [])
    for batch_size in options.batch_sizes:
        ours = tokens_per_second(batch_size, linear_step) if gpu() else None
        for position in options.positions:
            theirs = tokens_per_second(batch_size, softmax_step, position) if gpu() else None
            rows.append({"batch_size": batch_size, "position": position, "linear": ours, "softmax": theirs})
            keep()


def report(options, facts: dict[str, Any], results: dict[str, list[dict[str, Any]]]) -> str:
    number = lambda x: None if x is None else f"{x:,.0f}"  # noqa: E731
    rows = [
        [x["batch_size"], x["position"], number(x["linear"]), number(x["softmax"])] for x in results["steps"]
    ]
    where = f"Measured on {gpu()}." if gpu() else "Not measured on a GPU: there was none."
    return page(
        "Tokens per second on a GPU",
        where,
        f"`{facts['command']}`. {SHAPE}, bfloat16. A dash: not measured, or more than the GPU's memory.",
        markdown(["batch", "position", "linear attention", "softmax, transformers' cache"], rows, left=2),
    )


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK)
    return run(options, measure, report=report, facts=lambda options, results: {"gpu": gpu()})


if __name__ == "__main__":
    raise SystemExit(main())
