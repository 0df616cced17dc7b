"""A token of linear models opened by `tarnn.load`, beside transformers and beside reading as many bytes.

    python benchmarks/one_call.py --threads 1      # some minutes; benchmarks/results/one_call.{json,md}
    python benchmarks/one_call.py --families "Qwen3.5, 0.8 B"     # 8 GiB; runs/benchmarks/

The claim: one token more of any of these families takes about as long as reading the weights. A folder of each is written with
random weights, about 100 million of them, and opened in four formats. Greedy, batch 1, behind a prompt of 1,024 tokens, whose
time stands in the page, too. With float32 weights, small models write the same text as transformers' `generate`, or nothing is
measured. Other engines on the same folders: `one_call.md`.

Beside a token stands the least that memory allows: the bytes of the packed weights, of the states read and written, and of the
keys and values read, at the rate of the fastest of three plain reads of float32 numbers by torch (sum, maximum, scalar product),
in the same round with as many threads.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers as hf
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import tarnn
from scripts.common.clock import seconds_of
from scripts.common.options import parse
from scripts.common.others import taken_quietly
from scripts.common.results import run
from scripts.common.tables import markdown, page, source
from scripts.common.targets import Target, at_least, at_most, section
from tarnn.kernels.cpu.products import FORMATS
from tarnn.program.runtime import Runtime
from tarnn.program.state import new_state, tensors_of

COMMON = {"vocab_size": 16000, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZE = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4}
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
SSD = {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1}
OF_GRANITE = {
    "shared_intermediate_size": 2048,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "attention_multiplier": 1 / 64,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
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
}


def every(n: int, layers: int, other: str, attention: str = "full_attention") -> list[str]:
    """Attention in each n-th layer."""
    return [other if (i + 1) % n else attention for i in range(layers)]


FAMILIES: dict[
    str, Callable[[int], Any]
] = {  # a config with so many layers; twice as many of the large one, and of Mamba-2, which has no feed-forward
    "Qwen3.5": lambda n: hf.Qwen3_5TextConfig(
        **COMMON, **SIZE, **DELTA, head_dim=64, linear_num_key_heads=6, linear_num_value_heads=6, num_hidden_layers=n
    ),
    "LFM2": lambda n: hf.Lfm2Config(
        **COMMON,
        **{**SIZE, "intermediate_size": 2304},
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=n,
        layer_types=every(3, n, "conv"),
    ),
    "Granite 4": lambda n: hf.GraniteMoeHybridConfig(
        **COMMON,
        **SIZE,
        **OF_GRANITE,
        position_embedding_type=None,
        num_hidden_layers=n,
        layer_types=every(6, n, "mamba", "attention"),
    ),
    "Mamba-2": lambda n: hf.Mamba2Config(**COMMON, **SSD, num_hidden_layers=2 * n),
    LARGE: lambda n: hf.Qwen3_5TextConfig(**OF_LARGE, **DELTA, num_hidden_layers=2 * n),
}
FULL = {"families": [x for x in FAMILIES if x != LARGE], "layers": 12, "tokens": 24, "prompt": 1024, "rounds": 3}
QUICK = {"layers": 6, "tokens": 2, "prompt": 70, "rounds": 1}
THEIRS, THEIRS_16 = "transformers", "transformers, bfloat16"
FASTER, OF_MEMORY = 1.0, {"bfloat16": 1.15, "int8": 1.15, "int4": 1.25}
PROMPTS = {  # of Qwen3.5: how many times as fast as what
    ("float32", THEIRS): 1.3,
    ("bfloat16", THEIRS): 2.4,
    ("bfloat16", THEIRS_16): 1.8,
    ("int8", THEIRS): 4.0,
}
CHECKED = 64, 8  # tokens of a prompt, and behind it


def formats_of(name: str) -> tuple[str, ...]:
    """Return in which formats a family's weights are packed."""
    return ("bfloat16", "int8", "int4") if name == LARGE else FORMATS


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices={"families": list(FAMILIES)})
    with torch.no_grad():
        return run(options, measure, check=check, report=report)


def check(options) -> str:
    """Compare the texts of small models."""
    for name in {"Qwen3.5" if x == LARGE else x for x in options.families}:
        model = made(name, 6)
        if texts(model, *CHECKED) != texts(opened(model, "float32"), *CHECKED):
            return f"{name}: tarnn wrote another text than transformers"
    return ""


def made(name: str, layers: int) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(FAMILIES[name](layers)).eval()


def opened(model: Any, weights: str) -> Runtime:
    """Return the runtime of a model that was written into a folder and is opened from there."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return tarnn.load(folder, weights, tokenizer=object()).opened.step  # type: ignore[return-value]


def texts(model: Any, prompt: int, tokens: int) -> list[int]:
    return [int(x) for x, _ in written(model, prompt, tokens)]


def written(model: Any, prompt: int, tokens: int) -> list[tuple[Tensor, float]]:
    """Return the tokens that follow a prompt, the likeliest each, and the seconds after which each was there."""
    ids = torch.randint(3, COMMON["vocab_size"], (1, prompt), generator=torch.Generator().manual_seed(1))
    begun, found = time.perf_counter(), []
    if isinstance(model, Runtime):
        state = model.new_state(1, prompt + tokens)
        logits, state = model.prefill(ids, state, inplace=True)
    else:
        output = model(ids, use_cache=True)
        logits, state = output.logits[:, -1], output.cache
    for _ in range(tokens):
        token = logits.argmax(-1)
        found.append((token, time.perf_counter() - begun))
        if isinstance(model, Runtime):
            logits, state = model(token, state, inplace=True)
        else:
            logits = model(token[None], cache=state, use_cache=True).logits[:, -1]
    return found


def measure(options, found: dict[str, Any], keep) -> None:
    for name in options.families:
        model = made(name, options.layers)
        ways = {THEIRS: model, **{x: opened(model, x) for x in formats_of(name)}}
        if name == "Qwen3.5":  # Mamba-2 takes minutes in bfloat16
            ways[THEIRS_16] = deepcopy(model).bfloat16()
        rounds, share = taken_quietly(partial(all_rounds, ways, options))
        times = {}
        for way in ways:
            times[way] = {key: median(x[way][key] for x in rounds) for key in rounds[0][way]}
            print(f"{name:18}{way:16}" + "".join(f"  {key} {x:,.2f}" for key, x in times[way].items()), flush=True)
        found[name] = {"parameters": model.num_parameters(), "others": share, "ways": times}
        keep()


def all_rounds(ways: dict[str, Any], options) -> list[dict[str, dict[str, float]]]:
    tokens = {THEIRS_16: 2}  # slow where the processor has no bfloat16 products
    return [
        {way: once(model, options, tokens.get(way, options.tokens)) for way, model in ways.items()}
        for _ in range(options.rounds)
    ]


def once(model: Any, options, tokens: int) -> dict[str, float]:
    """Return milliseconds of the prompt and of a token, and of reading as much memory as a token takes."""
    at = [seconds for _, seconds in written(model, options.prompt, 1 + tokens)]
    found = {"prompt_ms": 1000 * at[0], "token_ms": 1000 * median(b - a for a, b in zip(at, at[1:], strict=False))}
    if isinstance(model, Runtime):
        size = read_by_a_step(model, options.prompt + tokens // 2)
        numbers = torch.ones(size // 4)
        reads = numbers.sum, numbers.max, partial(torch.dot, numbers, numbers)
        memory = 1000 * min(seconds_of(f, 5) for f in reads)
        found |= {"bytes": size, "memory_ms": memory, "times_memory": found["token_ms"] / memory}
    return found


def read_by_a_step(runtime: Runtime, position: int) -> int:
    """Return the bytes of the packed weights, twice those of the states, and those of the keys and values so far."""
    program, size = runtime.program, runtime.packed.block.numel()
    for spec, x in zip(program.states, tensors_of(new_state(program, 1, 1), program), strict=True):
        size += x.nbytes * (2 if spec.grows is None else position)
    return size


def targets(found: dict[str, Any]) -> list[Target]:
    ways = {name: one["ways"] for name, one in found.items()}
    wanted = []
    for x, most in OF_MEMORY.items():
        floors = {name: at[x]["times_memory"] for name, at in ways.items()}
        wanted.append(at_most(f"a token takes at most {most:g} times what memory allows", x, most, floors))
    faster = {name: at[THEIRS]["token_ms"] / at["float32"]["token_ms"] for name, at in ways.items() if "float32" in at}
    wanted += [at_least("a token is as fast as transformers'", "float32", FASTER, faster)] if faster else []
    for (x, other), least in PROMPTS.items():
        if x in ways.get("Qwen3.5", {}):
            ratio = ways["Qwen3.5"][other]["prompt_ms"] / ways["Qwen3.5"][x]["prompt_ms"]
            wanted.append(at_least(f"a prompt against {other}", x, least, {"Qwen3.5": ratio}))
    return wanted


def report(options, facts, found: dict[str, Any]) -> str:
    rows = []
    for name, one in found.items():
        theirs = one["ways"][THEIRS]
        for way, x in one["ways"].items():
            memory = [f"{x['memory_ms']:.1f}", f"{x['times_memory']:.2f}"] if "memory_ms" in x else [None, None]
            faster = [f"{theirs[key] / x[key]:.1f}" for key in ("token_ms", "prompt_ms")]
            label = f"{name}, {one['parameters'] / 1e6:.0f} M"
            row = [label, way, f"{x['token_ms']:.1f}", *memory, faster[0], f"{x['prompt_ms']:,.0f}", faster[1]]
            rows.append(row)
    columns = "model | computed by | ms a token | memory alone, ms | times memory alone | times as fast as transformers"
    header = f"{columns} | {options.prompt:,} tokens, ms | times as fast"
    about = f"Medians of {options.rounds} rounds, in turns; greedy, batch 1."
    table = markdown(header, rows, left=2)
    return page("Linear models, the whole model in one call", source(facts, about), section(targets(found)), table)


if __name__ == "__main__":
    raise SystemExit(main())
