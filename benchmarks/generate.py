"""transformers' `generate` on a model of tarnn's, with the fused step and without, against a Llama of the same shape.

    python benchmarks/generate.py        # four minutes; benchmarks/results/generate.{json,md}

The claim: who calls `model.generate`, or a pipeline, need not know of the fused step to be as fast as it allows. Greedy,
batch 1, 16 tokens of a prompt and then 128 more, random weights, float32. In turns: `generate` as it is, which packs the
weights in each call; within `fused_forward(model, "int8")`, packed in each call as well; with the model's own step; the
token loop of `tarnn generate` with a step that was packed before; and `generate` of transformers' own Llama with its cache.
All of ours must write the same text, but for int8. Models of other families, as rows: `one_call.py`.

Then, for the smallest size, the token loop beside what an expert writes: a bare PyTorch Llama with one product for q, k and
v and a cache that is allocated once (`toolkit/bare_llama.py`); 32, 128 and 512 tokens, batch 1 and 16; linear and softmax.
Its logits are checked against transformers' first.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.bare_llama import BareLlama

from scripts.common.clock import Contender, Effort, Timing, measure_in_turns
from scripts.common.options import parse
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, page, source
from scripts.common.targets import GUARANTEE
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.decoding.loop import TokenLoop
from tarnn.huggingface.fused_forward import fused_forward
from tarnn.models import TarnnConfig, TarnnForCausalLM

SIZES = {"256 × 8": (256, 8), "512 × 8": (512, 8), "512 × 12": (512, 12)}  # hidden width × layers
HEADS, PROMPT = 8, 16
PATIENCE = 10.0  # seconds a text
OWN, UNASKED, INT8, LOOP, LLAMA = (
    "generate, the model's own step",
    "generate",
    "generate, int8",
    "the token loop",
    "generate, Llama",
)
BARE = "a bare PyTorch loop, Llama"
LOOPS = {  # attention, weights
    "linear": ("linear", "float32"),
    "linear, int8": ("linear", "int8"),
    "softmax": ("softmax", "float32"),
    "softmax, int8": ("softmax", "int8"),
}


def main() -> int:
    options = parse(
        __file__,
        __doc__,
        {"tokens": 128, "rounds": 5, "sizes": list(SIZES), "lengths": [32, 128, 512], "batch_sizes": [1, 16]},
        {"tokens": 12, "rounds": 3, "sizes": ["256 × 8"], "lengths": [8], "batch_sizes": [2]},
        choices={"sizes": list(SIZES)},
    )
    with torch.no_grad():
        return run(options, measure, check=lambda options: wrong(), report=report)


def wrong() -> str:
    """What is wrong with the bare loop, or nothing: logits of a prompt and of two tokens more, against transformers'."""
    _, llama = models(64, 2)
    ids = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(2))
    bare, expected = BareLlama(llama, 3, 12), llama(ids).logits
    for begin, end in ((0, 7), (7, 8), (8, 9)):
        error = (bare.logits(ids[:, begin:end], begin) - expected[:, end - 1]).abs().max()
        if not error < 1e-4:
            return f"the bare loop's logits of token {end} are off by {error:.1e}"
    return ""


def measure(options, found: dict[str, Any], keep) -> None:
    for size in options.sizes:
        model, llama = models(*SIZES[size])
        if reason := refusal(model):
            raise Unmeasured(f"there is no fused step here: {reason}.")
        ways = contenders(model, llama, options.tokens)
        texts = {}
        for name in (OWN, UNASKED, LOOP):
            with ways[name].surroundings():
                texts[name] = ways[name].call()
        if wrong := [name for name, text in texts.items() if not torch.equal(text, texts[OWN])]:
            raise Unmeasured(f"{', '.join(wrong)} wrote another text than {OWN}.")
        timings = measure_in_turns(ways, Effort(0, rounds=(options.rounds, options.rounds), seconds=60))
        for name, x in timings.items():
            print(f"{size:10}{name:32}{x.ms / options.tokens:8.2f} ms a token", flush=True)
        parameters = {"tarnn": model.num_parameters(), "llama": llama.num_parameters()}
        found[size] = {"parameters": parameters, "timings": timings}
        keep()
    size, *_ = options.sizes
    _, llama = models(*SIZES[size])
    found[size]["loops"] = {}
    for batch_size, tokens in product(options.batch_sizes, options.lengths):
        timings = measure_in_turns(loops(size, llama, batch_size, tokens), Effort(0, rounds=(3, 3), seconds=60))
        found[size]["loops"][f"{batch_size} × {tokens}"] = timings
        times = ", ".join(f"{name} {x.ms / tokens:.2f}" for name, x in timings.items())
        print(f"{size:10}batch {batch_size}, {tokens} tokens: {times} ms a token", flush=True)
        keep()


def loops(size: str, llama: LlamaForCausalLM, batch_size: int, tokens: int) -> dict[str, Contender]:
    """Ours and the expert's, for one batch size and length of text."""
    prompt = torch.randint(0, 256, (batch_size, PROMPT), generator=torch.Generator().manual_seed(1))
    contenders = {
        BARE: Contender(partial(BareLlama(llama, batch_size, PROMPT + tokens).generate, prompt, tokens), PATIENCE)
    }
    for name, (attention, weights) in LOOPS.items():
        model = ours(*SIZES[size], attention)
        contenders[name] = Contender(partial(write, model, FusedStep(model, weights), prompt, tokens), PATIENCE)
    return contenders


def models(hidden: int, layers: int) -> tuple[TarnnForCausalLM, LlamaForCausalLM]:
    """tarnn's default model of this size, and a Llama as wide, as deep, and with the same feed-forward."""
    model = ours(hidden, layers)
    theirs = LlamaConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=model.config.intermediate_size,
        tie_word_embeddings=True,
    )
    return model, LlamaForCausalLM(theirs).eval()


def ours(hidden: int, layers: int, attention: str = "linear") -> TarnnForCausalLM:
    torch.manual_seed(0)
    position = {"position": "rotary"} if attention == "softmax" else {}
    config = TarnnConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=HEADS, attention=attention, **position
    )
    return TarnnForCausalLM(config).eval()


def contenders(model: TarnnForCausalLM, llama: LlamaForCausalLM, tokens: int) -> dict[str, Contender]:
    prompt = torch.randint(0, 256, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    generated = partial(
        call_generate,
        prompt=prompt,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
    )
    return {
        OWN: Contender(generated(model), surroundings=lambda: fused_forward(model, None)),
        UNASKED: Contender(generated(model)),
        INT8: Contender(generated(model), surroundings=lambda: fused_forward(model, "int8")),
        LOOP: Contender(partial(write, model, FusedStep(model), prompt, tokens)),
        LLAMA: Contender(generated(llama)),
    }


def call_generate(model: Any, prompt: Tensor, **options: Any) -> Callable[[], Tensor]:
    return lambda: model.generate(prompt, **options)[:, PROMPT:]


def write(model: TarnnForCausalLM, step: FusedStep, prompt: Tensor, tokens: int) -> Tensor:
    """What `tarnn generate` does."""
    loop = TokenLoop(model, model.new_state(len(prompt), capacity=prompt.shape[1] + tokens), step=step)
    loop.read(prompt)
    return torch.stack(list(loop.tokens(lambda logits: logits.argmax(-1), tokens)), 1)


def report(options, facts, found: dict[str, Any]) -> str:
    rows = []
    for size, at in found.items():
        timings: dict[str, Timing] = at["timings"]
        millions = at["parameters"]["tarnn"] / 1e6
        each = [f"{timings[x].ms / options.tokens:.2f}" for x in (LLAMA, OWN, UNASKED, INT8, LOOP)]
        rows.append([size, f"{millions:.1f} M", *each])
    return page(
        "Milliseconds a token of transformers' `generate`",
        source(facts, f"{options.tokens} tokens after a prompt of {PROMPT}, batch 1, greedy, random weights. Medians."),
        GUARANTEE,
        markdown(["width × layers", "parameters", LLAMA, OWN, UNASKED, INT8, LOOP], rows),
        "The weights are packed in each call of `generate`; for the token loop they were packed before. A Llama's token costs "
        f"more the longer its cache is; here it has at most {PROMPT + options.tokens} keys.",
        "## Beside what an expert writes",
        "Milliseconds per token of the whole batch, prompt included; the token loop with weights packed before. The bare "
        "loop is plain PyTorch: one product for q, k and v, one for both halves of the feed-forward, a cache allocated once.",
        markdown(["width × layers", "batch × tokens", BARE, *LOOPS], loop_rows(found), left=2),
    )


def loop_rows(found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for size, at in found.items():
        for where, timings in at.get("loops", {}).items():
            tokens = int(where.split(" × ")[1])
            rows.append([size, where, *(f"{timings[x].ms / tokens:.2f}" for x in (BARE, *LOOPS))])
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
