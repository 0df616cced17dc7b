"""transformers' `generate` on a model of tarnn's, with the fused step and without, against a Llama of the same shape.

    python benchmarks/generate.py        # four minutes; benchmarks/results/generate.{json,md}

The claim: who calls `model.generate`, or a pipeline, need not know of the fused step to be as fast as it allows. Greedy,
batch 1, 16 tokens of a prompt and then 128 more, random weights, float32. In turns: `generate` as it is, whose first call
packed the weights, and which compares the model with them in each later call; the same where each call packs them anew; within
`fused_forward(model, "int8")`, packed once as well; with the model's own step; the token loop of `tarnn generate`; and
`generate` of transformers' own Llama with its cache. All of ours must write the same text, but for int8. Models of other
families, as rows: `one_call.py`. The second short text of a larger model: `first_token.py`.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.clock import Contender, Effort, Timing, measure_in_turns
from scripts.common.options import parse
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, page, source
from scripts.common.targets import GUARANTEE
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.decoding.kept import forget
from tarnn.decoding.loop import TokenLoop
from tarnn.huggingface.fused_forward import fused_forward
from tarnn.models import TarnnConfig, TarnnForCausalLM

SIZES = {"256 × 8": (256, 8), "512 × 8": (512, 8), "512 × 12": (512, 12)}  # hidden width × layers
HEADS, PROMPT = 8, 16
OWN, UNASKED, ANEW, INT8, LOOP, LLAMA = (
    "generate, the model's own step",
    "generate",
    "generate, packing each time",
    "generate, int8",
    "the token loop",
    "generate, Llama",
)


WAYS = (LLAMA, OWN, ANEW, UNASKED, INT8, LOOP)  # in the order of the table


def main() -> int:
    options = parse(
        __file__,
        __doc__,
        {"tokens": 128, "rounds": 5, "sizes": list(SIZES)},
        {"tokens": 12, "rounds": 3, "sizes": ["256 × 8"]},
        choices={"sizes": list(SIZES)},
    )
    with torch.no_grad():
        return run(options, measure, report=report)


def measure(options, found: dict[str, Any], keep) -> None:
    for size in options.sizes:
        model, llama = models(*SIZES[size])
        if reason := refusal(model):
            raise Unmeasured(f"there is no fused step here: {reason}.")
        ways = contenders(model, llama, options.tokens)
        texts = {}
        for name in (OWN, UNASKED, ANEW, LOOP):
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


def models(hidden: int, layers: int) -> tuple[TarnnForCausalLM, LlamaForCausalLM]:
    """tarnn's default model of this size, and a Llama as wide, as deep, and with the same feed-forward."""
    torch.manual_seed(0)
    config = TarnnConfig(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=HEADS)
    model = TarnnForCausalLM(config).eval()
    theirs = LlamaConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=model.config.intermediate_size,
        tie_word_embeddings=True,
    )
    return model, LlamaForCausalLM(theirs).eval()


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
    in_int8 = copy.deepcopy(model)  # one format is kept of a model
    text = generated(model)
    return {
        OWN: Contender(text, surroundings=lambda: fused_forward(model, None)),
        UNASKED: Contender(text),
        ANEW: Contender(lambda: (forget(model), text())[1]),
        INT8: Contender(generated(in_int8), surroundings=lambda: fused_forward(in_int8, "int8")),
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
        each = [f"{timings[x].ms / options.tokens:.2f}" for x in WAYS]
        rows.append([size, f"{millions:.1f} M", *each])
    return page(
        "Milliseconds a token of transformers' `generate`",
        source(facts, f"{options.tokens} tokens after a prompt of {PROMPT}, batch 1, greedy, random weights. Medians."),
        GUARANTEE,
        markdown(["width × layers", "parameters", *WAYS], rows),
        "The weights were packed before, and each call of `generate` compares the model with them, but where it says that each "
        f"call packs. A Llama's token costs more the longer its cache is; here it has at most {PROMPT + options.tokens} keys.",
    )


if __name__ == "__main__":
    raise SystemExit(main())
