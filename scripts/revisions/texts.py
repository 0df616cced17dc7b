"""Texts of small models that the old revision made and saved: drawn configs, prompts, samplers, batches and states."""

import random
from pathlib import Path
from typing import Any

import torch

import tarnn

A_MODEL = 20  # texts
VOCABULARY = 61


def compute(number: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for i in range(0, number, A_MODEL):
        model = made(i, folder / f"model-{i}")
        for j in range(i, min(i + A_MODEL, number)):
            try:
                found |= {f"text {j}: {part}": x for part, x in text(model, random.Random(f"text {j}")).items()}
            except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
                found[f"text {j}: refused"] = f"{type(error).__name__}: {error}"
    return found


def made(i: int, folder: Path) -> Any:
    """The model that lies in the folder; the old revision, which comes first, puts it there."""
    if not folder.exists():
        torch.manual_seed(i)
        model = tarnn.TarnnForCausalLM(tarnn.TarnnConfig(**config(random.Random(f"model {i}"))))
        model.save_pretrained(folder)
    return tarnn.TarnnForCausalLM.from_pretrained(folder).eval()


def config(draw: random.Random) -> dict[str, Any]:
    layers, heads, width = draw.choice([1, 2, 3]), draw.choice([1, 2, 4]), draw.choice([8, 16, 32])
    attention = [draw.choice(["linear", "linear", "softmax", "none"]) for _ in range(layers)]
    position = draw.choice(["rotary", "sinusoidal", "learned", "none"])
    decays = ["none", "head", "token", *(["channel"] if position != "rotary" else [])]
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "attention": attention,
        "max_position_embeddings": 512,
        "feature_map": draw.choice(["elu", "favor", "relu", "hedgehog", "dpfp", "clusters"]),
        "position": position,
        "decay": draw.choice(decays) if "linear" in attention else "none",
    }


def text(model: Any, draw: random.Random) -> dict[str, torch.Tensor]:
    torch.manual_seed(draw.randrange(2**31))
    rows, length, new = draw.choice([1, 1, 1, 3]), draw.choice([1, 5, 33]), draw.choice([1, 24])
    ids, mask = torch.randint(3, VOCABULARY, (rows, length)), torch.ones(rows, length, dtype=torch.long)
    for row in range(1, rows):
        mask[row, : draw.randrange(length)] = 0
    options: dict[str, Any] = {"do_sample": draw.random() < 0.6}
    if options["do_sample"]:
        options |= {"temperature": draw.choice([0.7, 1.0]), "top_k": draw.choice([0, 10])}
    elif draw.random() < 0.3:
        options |= {"num_beams": 2}
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return {"ids": made.sequences, "logits": torch.stack(made.logits)}
