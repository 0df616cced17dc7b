"""What weights of fewer bits cost a trained model in bits per byte, by the fused step.

    python experiments/fewer_bits.py --model runs/byte_model/model --books FOLDER      # three minutes; experiments/results/

A model of bytes that `byte_model.py` trained, a stock Llama, whose weights are put into a `TarnnForCausalLM` with softmax layers.
Its fused step reads rows of the two books that training held out, all rows at once, byte by byte; the activations are rounded as
in generation.
"""

import gzip
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.byte_model import HELD_OUT
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page, source
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.kernels.cpu.products import FORMATS
from tarnn.models import TarnnConfig, TarnnForCausalLM

FULL = {"model": Path, "books": Path, "rows": 24, "length": 1024}
QUICK = {"rows": 2, "length": 16}
ABOUT = {
    "model": "a folder with a LlamaForCausalLM of 256 tokens",
    "books": "a folder of .txt.gz",
    "rows": "of both books together",
}
NAMES = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm", "self_attn": "attention"}


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, about=ABOUT)
    with torch.no_grad():
        return run(options, measure, check=lambda options: refusal(load(options.model)) or "", report=report)


def measure(options, found: dict[str, Any], keep: Callable[[], None]) -> None:
    model, ids = load(options.model), held_out(options.books, options.rows, options.length)
    for weights in FORMATS:
        step, state = FusedStep(model, weights), model.new_state(len(ids), capacity=options.length)
        nats = 0.0
        for i in range(options.length - 1):
            logits, state = step(ids[:, i], state, inplace=True)
            nats += torch.nn.functional.cross_entropy(logits, ids[:, i + 1], reduction="sum").item()
        found[weights] = {
            "bits_per_byte": nats / math.log(2) / ids[:, 1:].numel(),
            "bytes": step.runtime.packed.block.numel(),
        }
        print(weights, found[weights], flush=True)
        keep()


def load(folder: Path) -> TarnnForCausalLM:
    """A stock Llama as one of our models, which computes the same."""
    from transformers import LlamaForCausalLM

    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    c = theirs.config
    ours = TarnnForCausalLM(
        TarnnConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            num_hidden_layers=c.num_hidden_layers,
            num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_key_value_heads,
            intermediate_size=c.intermediate_size,
            attention="softmax",
            position="rotary",
            qk_norm=False,
            norm_eps=c.rms_norm_eps,
            tie_word_embeddings=c.tie_word_embeddings,
            max_position_embeddings=c.max_position_embeddings,
        )
    ).eval()
    weights = {}
    for name, x in theirs.state_dict().items():
        for before, after in NAMES.items():
            name = name.replace(before, after)
        weights[name] = x
    ours.load_state_dict(weights)
    return ours


def held_out(books: Path, rows: int, length: int) -> Tensor:
    """(rows, length) bytes, the same number from each book."""
    found = []
    for name in HELD_OUT:
        with gzip.open(books / f"{name}.txt.gz") as file:
            text = file.read()
        starts = torch.linspace(len(text) // 10, len(text) - length, rows // len(HELD_OUT)).long().tolist()
        found += [list(text[start : start + length]) for start in starts]
    return torch.tensor(found)


def report(options, facts: dict[str, Any], found: dict[str, Any]) -> str:
    best = found["float32"]["bits_per_byte"]
    rows = [
        [weights, f"{x['bytes']:,}", f"{x['bits_per_byte']:.4f}", f"{100 * (x['bits_per_byte'] / best - 1):+.2f} %"]
        for weights, x in found.items()
    ]
    said = f"{options.rows} rows of {options.length:,} bytes from {' and '.join(HELD_OUT)}."
    return page(
        "Weights of fewer bits", source(facts, said), markdown(["weights", "bytes", "bits per byte", "change"], rows)
    )


if __name__ == "__main__":
    sys.exit(main())
