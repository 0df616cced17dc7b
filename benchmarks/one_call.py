"""Other families by the fused step: converted Llamas, and Qwen3.5, OLMo-hybrid and Mamba-2 of transformers.

    python benchmarks/one_call.py        # some ten minutes; benchmarks/results/one_call.{json,md}
    python benchmarks/one_call.py --families "Qwen3.5, 0.8 B"     # less than that, and 8 GiB; runs/benchmarks/

The claim: `model.generate` of a patched model, or of a converted one, is several times as fast as transformers. Random weights,
about 100 million parameters, greedy, batch 1. In turns: transformers as it comes; tarnn's ops, layer by layer (patched; of a
Llama: converted); the fused step in four formats. One text each: a prompt of 1,024 tokens, then 24 more. The prompt's time ends
with the first new token, and packing the weights is in it, as `generate` packs for each text; a token's is the median of the
others. With float32 weights, small models write the same text in all ways, or nothing is measured. The large one is of the shape
of Qwen3.5-0.8B: transformers in float32 beside the fused step in bfloat16 and int8.

Beside a token stands the least that memory allows: the bytes of the packed weights and twice those of the states, at the rate at
which torch sums as many float32 numbers, or finds their maximum, whichever is faster, measured in the same turns.
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.generation.streamers import BaseStreamer

sys.path.insert(0, str(Path(__file__).parents[1]))
import tarnn
from scripts.common.clock import seconds_of
from scripts.common.options import parse
from scripts.common.others import taken_quietly
from scripts.common.results import run
from scripts.common.tables import markdown, page, source
from scripts.common.targets import Target, at_least, at_most, section
from tarnn.conversion import set_options
from tarnn.decoding.fused import FusedStep
from tarnn.huggingface.fused_forward import fused_forward
from tarnn.kernels.cpu.products import FORMATS

COMMON = {"vocab_size": 16000, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
DELTA = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
}
LARGE = "Qwen3.5, 0.8 B"
OF_LARGE = {
    **COMMON,
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
SSD = {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1}
CONVERTED = "Llama, converted"
FAMILIES: dict[
    str, Callable[[int], Any]
] = {  # a config with so many layers; twice as many of the large one, and of Mamba-2, which has no feed-forward
    CONVERTED: lambda layers: hf.LlamaConfig(**COMMON, **SIZE, num_hidden_layers=layers),
    "Qwen3.5": lambda layers: hf.Qwen3_5TextConfig(**COMMON, **SIZE, **DELTA, num_hidden_layers=layers),
    "OLMo-hybrid": lambda layers: hf.OlmoHybridConfig(**COMMON, **SIZE, **DELTA, num_hidden_layers=layers),
    "Mamba-2": lambda layers: hf.Mamba2Config(**COMMON, **SSD, num_hidden_layers=2 * layers),
    LARGE: lambda layers: hf.Qwen3_5TextConfig(**OF_LARGE, num_hidden_layers=2 * layers),
}
FULL = {"families": [x for x in FAMILIES if x != LARGE], "layers": 12, "tokens": 24, "prompt": 1024, "rounds": 3}
QUICK = {"layers": 4, "tokens": 2, "prompt": 70, "rounds": 1}
THEIRS, OURS = "transformers", "layer by layer"
FASTER, FASTER_PROMPT, OF_MEMORY = 4.0, 3.0, 1.3
CHECKED = 64, 8  # tokens of a prompt, and behind it


def formats_of(name: str) -> tuple[str, ...]:
    """In which formats a family's weights are packed."""
    return ("bfloat16", "int8") if name == LARGE else FORMATS


def ways_of(name: str) -> tuple[str, ...]:
    return (THEIRS, *formats_of(name)) if name == LARGE else (THEIRS, OURS, *FORMATS)


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices={"families": list(FAMILIES)})
    with torch.no_grad():
        return run(options, measure, check=check, report=report)


def check(options) -> str:
    """The texts of tiny models."""
    for name in {"Qwen3.5" if x == LARGE else x for x in options.families}:
        model, texts = made(name, 4), {}
        for way in (THEIRS, OURS, "float32"):
            if (name, way) != (CONVERTED, THEIRS):  # which estimates, so that its text is another
                with surroundings(name, model, way):
                    texts[way] = written(model, *CHECKED)
        if wrong := [way for way, text in texts.items() if not torch.equal(text, texts[OURS])]:
            return f"{name}: {', '.join(wrong)} wrote another text than {OURS}"
    return ""


def made(name: str, layers: int) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[name](layers)).eval()
    model.generation_config.eos_token_id = None
    if name == CONVERTED:
        model.set_attn_implementation("tarnn_hybrid")
        set_options(model, feature_map="clusters")
    return model


def surroundings(name: str, model: Any, way: str) -> ExitStack:
    """What holds while a model is called in one of the ways."""
    stack = ExitStack()
    if name == CONVERTED:
        model.set_attn_implementation("sdpa" if way == THEIRS else "tarnn_hybrid")
    elif way != THEIRS:
        stack.enter_context(tarnn.patch_transformers())
    if way != THEIRS:
        stack.enter_context(fused_forward(model, None if way == OURS else way))
    return stack


def written(model: Any, prompt: int, tokens: int, clock: "Stamps | None" = None) -> Tensor:
    """A prompt, and so many tokens more."""
    ids = torch.randint(3, COMMON["vocab_size"], (1, prompt), generator=torch.Generator().manual_seed(1))
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, streamer=clock)


class Stamps(BaseStreamer):
    """The moments at which `generate` has had a prompt, and each token."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: Tensor) -> None:
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        pass


def measure(options, found: dict[str, Any], keep) -> None:
    for name in options.families:
        model, times = made(name, options.layers), {}
        read = {way: read_by_a_step(name, model, way) for way in formats_of(name)}
        rounds, share = taken_quietly(partial(all_rounds, name, model, read, options))
        for way in ways_of(name):
            times[way] = {key: median(x[way][key] for x in rounds) for key in rounds[0][way]}
            if way in read:
                times[way] |= {"memory_ms": min(x[way]["memory_ms"] for x in rounds), "bytes": read[way]}
            print(f"{name:18}{way:16}" + "".join(f"  {key} {x:,.1f}" for key, x in times[way].items()), flush=True)
        found[name] = {"parameters": model.num_parameters(), "others": share, "ways": times}
        keep()


def all_rounds(*given: Any) -> list[dict[str, dict[str, float]]]:
    return [one_round(*given) for _ in range(given[-1].rounds)]


def one_round(name: str, model: Any, read: dict[str, int], options) -> dict[str, dict[str, float]]:
    """Milliseconds of a token and of the prompt, way by way; and of reading as much memory as a token takes."""
    found = {}
    for way in ways_of(name):
        clock = Stamps()
        with surroundings(name, model, way):
            written(model, options.prompt, 1 + options.tokens, clock)
        begin, first, *rest = clock.seconds
        tokens = [1000 * (b - a) for a, b in pairwise([first, *rest])]
        found[way] = {"token_ms": median(tokens), "prompt_ms": 1000 * (first - begin)}
        if way in read:
            numbers = torch.ones(read[way] // 4)
            found[way]["memory_ms"] = 1000 * min(seconds_of(f, 3) for f in (numbers.sum, numbers.max))
    return found


def read_by_a_step(name: str, model: Any, weights: str) -> int:
    """Bytes of the packed weights, and twice those of the states without keys."""
    with surroundings(name, model, OURS):
        step = FusedStep(model, weights)
        states = step.new_state(1, CHECKED[0])
    tensors = [x for x in pytree.tree_leaves(states) if isinstance(x, Tensor)]
    return step.runtime.packed.block.numel() + 2 * sum(x.nbytes for x in tensors)


def targets(found: dict[str, Any]) -> list[Target]:
    ways = {name: one["ways"] for name, one in found.items()}
    floors = {
        f"{name}, {x}": at[x]["token_ms"] / at[x]["memory_ms"] for name, at in ways.items() for x in formats_of(name)
    }
    faster, prompts = (
        {name: at[THEIRS][key] / at["float32"][key] for name, at in ways.items() if "float32" in at}
        for key in ("token_ms", "prompt_ms")
    )
    of_small = [
        at_least(f"a token: at least {FASTER:g} times as fast as transformers", "float32", FASTER, faster),
        at_least(f"a prompt: at least {FASTER_PROMPT:g} times as fast", "float32", FASTER_PROMPT, prompts),
    ]
    return [
        *(of_small if faster else []),
        at_most(f"a token takes at most {OF_MEMORY:g} times what memory allows", "all formats", OF_MEMORY, floors),
    ]


def report(options, facts, found: dict[str, Any]) -> str:
    rows = []
    for name, one in found.items():
        theirs = one["ways"][THEIRS]
        for way, x in one["ways"].items():
            faster = [f"{theirs[key] / x[key]:.1f}" for key in ("token_ms", "prompt_ms")]
            memory = f"{x['memory_ms']:.1f}" if "memory_ms" in x else None
            label = f"{name}, {one['parameters'] / 1e6:.0f} M"
            rows.append([label, way, f"{x['token_ms']:.1f}", faster[0], memory, f"{x['prompt_ms']:,.0f}", faster[1]])
    header = [
        "model",
        "computed by",
        "ms a token",
        "times as fast",
        "memory alone, ms",
        f"{options.prompt:,} tokens, ms",
    ]
    about = f"Medians of {options.rounds} rounds, in turns; greedy, batch 1."
    table = markdown([*header, "times as fast"], rows, left=2)
    return page("Other families, the whole model in one call", source(facts, about), section(targets(found)), table)


if __name__ == "__main__":
    raise SystemExit(main())
