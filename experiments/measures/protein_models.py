"""Models of proteins, by attention: what they are trained on, how, and what they guess right."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from scripts.common.loop import train
from tarnn.data.proteins import AMINO_ACIDS, Protein
from tarnn.data.tokenizers import amino_tokenizer, encode
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnForMaskedLM

FULL = {
    "steps": 1000,
    "every": 250,
    "context": 256,
    "batch_size": 8,
    "hidden_size": 64,
    "layers": 3,
    "heads": 8,
    "features": 32,
    "learning_rate": 6e-3,
    "test_sequences": 200,
    "data": Path,
}
QUICK = {
    "steps": 4,
    "every": 2,
    "context": 64,
    "batch_size": 2,
    "hidden_size": 32,
    "layers": 1,
    "heads": 2,
    "features": 8,
    "test_sequences": 4,
}
ATTENTION: dict[str, tuple[dict[str, Any], str]] = {  # name → (keys of the config, how it is drawn)
    "softmax": ({"attention": "softmax"}, "#d55e00"),
    "Performer-softmax": ({"feature_map": "favor"}, "#0072b2"),
    "Performer-ReLU": ({"feature_map": "generalized"}, "#009e73"),
    "elu + 1": ({"feature_map": "elu"}, "#e69f00"),
}
PAPER = {  # accuracy and perplexity, Test and OOD: table 2
    "unidirectional": {
        "empirical": (9.92, 17.80, 9.07, 17.93),
        "softmax": (30.80, 9.37, 19.70, 13.20),
        "Performer-ReLU": (31.58, 9.17, 18.44, 13.63),
    },
    "bidirectional": {
        "empirical": (9.92, 17.80, 9.07, 17.93),
        "softmax": (33.32, 9.22, 25.07, 12.09),
        "Performer-ReLU": (36.09, 8.36, 24.10, 12.26),
        "Performer-softmax": (33.00, 9.24, 23.48, 12.41),
    },
}
MASKED, IGNORED = 0.15, -100
SEED_STRIDE = 1_000_000  # a seed's batches have numbers of their own
TOKENS = amino_tokenizer()
RESIDUES = len(AMINO_ACIDS)


class Data(NamedTuple):
    train: np.ndarray  # ids, sequences one after the other, each followed by the separator
    test: list[np.ndarray]
    ood: list[np.ndarray]
    facts: dict[str, int]

    @classmethod
    def of(cls, train: Sequence[Protein], test: Sequence[Protein], ood: Sequence[Protein], **facts: int) -> "Data":
        """Proteins to train on, others of known families, and those of families that are held out."""
        row = end_to_end([ids_of(x) for x in train])
        counts = {"training": len(train), "training residues": len(row) - len(train)}
        counts |= {"test": len(test), "of held-out families": len(ood)}
        return cls(row, [ids_of(x) for x in test], [ids_of(x) for x in ood], counts | facts)


def end_to_end(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Sequences one after the other, each followed by the separator."""
    return np.concatenate([np.append(x, TOKENS.eos_token_id) for x in sequences])


def ids_of(protein: Protein) -> np.ndarray:
    return encode(TOKENS, protein.sequence.encode(), protein.place)


def empirical(data: Data) -> dict[str, Any]:
    """What a model comes to that knows the frequency of each residue only."""
    count = Counter(data.train.tolist())
    frequency = torch.tensor([count[i] + 1.0 for i in range(TOKENS.eos_token_id)])
    log_p = (frequency / frequency.sum()).log()
    found = {}
    for part, rows in (("test", data.test), ("ood", data.ood)):
        ids = torch.from_numpy(np.concatenate(rows))
        accuracy = (ids == log_p.argmax()).double().mean()
        found[part] = {"accuracy": 100 * float(accuracy), "perplexity": math.exp(-float(log_p[ids].double().mean()))}
    return found


def build(direction: str, name: str, options, seed: int = 0) -> TarnnForCausalLM | TarnnForMaskedLM:
    torch.manual_seed(seed)
    given = dict(ATTENTION[name][0])
    if given.get("feature_map") == "favor":
        given["feature_map_options"] = {"favor": {"num_features": options.features}}
    config = TarnnConfig(
        vocab_size=len(TOKENS),
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        decay="none",
        position="sinusoidal",
        causal=direction == "unidirectional",
        eos_token_id=TOKENS.eos_token_id,
        pad_token_id=TOKENS.eos_token_id,
        **given,
    )
    return (TarnnForCausalLM if config.causal else TarnnForMaskedLM)(config)


def folder_of(direction: str, name: str, options, seed: int = 0) -> Path:
    return options.runs / f"{direction}_{name.replace(' ', '')}{f'_{seed}' if seed else ''}"


def trained(direction: str, name: str, data: Data, options, seed: int = 0) -> dict[str, Any]:
    """One run, from where it was stopped. A seed sets the weights at the start and the order of the data."""
    model = build(direction, name, options, seed)
    folder = folder_of(direction, name, options, seed)

    def loss(model, step: int) -> Tensor:
        return mean_loss(direction, model, data, options, step + SEED_STRIDE * seed)

    done = train(
        folder,
        model,
        loss,
        options.steps,
        every=options.every,
        learning_rate=options.learning_rate,
        measure=lambda model: shares(evaluate(direction, model, data.test[:50], options.context)),
    )
    model.save_pretrained(folder / "model")  # for `tarnn show`
    TOKENS.save_pretrained(folder / "model")
    return {
        **{
            part: evaluate(direction, model, rows, options.context)
            for part, rows in (("test", data.test), ("ood", data.ood))
        },
        "seconds_a_step": done.seconds / done.step,
        "parameters": sum(x.numel() for x in model.parameters()),
        "curve": done.curve,
    }


def shares(found: dict[str, Any]) -> dict[str, float]:
    return {name: found[name] for name in ("accuracy", "perplexity")}


def mean_loss(direction: str, model, data: Data, options, batch: int) -> Tensor:
    """In nats per guessed residue, of the batch of that number."""
    rows = windows(data.train, options.context, options.batch_size, batch)
    inputs, targets = task(direction, rows, torch.Generator().manual_seed(batch))
    return cross_entropy(logits_of(model, inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def windows(ids: np.ndarray, context: int, batch_size: int, step: int) -> Tensor:
    """(b, context + 1): stretches of concatenated sequences, from anywhere."""
    starts = np.random.default_rng(step).integers(len(ids) - context, size=batch_size)
    return torch.from_numpy(ids[starts[:, None] + np.arange(context + 1)])


def task(direction: str, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of rows of residues: the next one, or those that are masked."""
    if direction == "unidirectional":
        return rows[:, :-1], rows[:, 1:]
    rows = rows[:, 1:]
    chance = torch.rand(rows.shape, generator=generator)
    hidden = (chance < MASKED) & (rows < TOKENS.eos_token_id)
    inputs = rows.masked_fill(hidden & (chance < 0.8 * MASKED), TOKENS.mask_token_id)
    others = torch.randint(RESIDUES, rows.shape, generator=generator)
    inputs = torch.where(hidden & (chance >= 0.8 * MASKED) & (chance < 0.9 * MASKED), others, inputs)
    return inputs, rows.masked_fill(~hidden, IGNORED)


def logits_of(model, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
    more = {"use_cache": False} if model.config.causal else {}
    return model(input_ids=inputs, attention_mask=mask, **more).logits.float()


@torch.no_grad()
def evaluate(direction: str, model, rows: list[np.ndarray], context: int, batch_size: int = 8) -> dict[str, Any]:
    """Accuracy in per cent and perplexity of the first `context` residues of each sequence, each read by itself.

    nats and residues: of each sequence, the shortest first.
    """
    nats, right, numbers = list[float](), 0, list[int]()
    rows = sorted((row[:context] for row in rows), key=len)
    for start in range(0, len(rows), batch_size):
        some = rows[start : start + batch_size]
        longest = max(map(len, some))
        ids = torch.full((len(some), longest + 1), TOKENS.eos_token_id)
        for i, row in enumerate(some):
            ids[i, 1 : len(row) + 1] = torch.from_numpy(row)
        real = torch.arange(longest)[None] < torch.tensor([[len(row)] for row in some])
        inputs, targets = ids[:, :-1], ids[:, 1:]
        if direction == "bidirectional":
            hidden = torch.rand(targets.shape, generator=torch.Generator().manual_seed(start)) < MASKED
            inputs, real_targets = targets.masked_fill(hidden, TOKENS.mask_token_id), real & hidden
        else:
            real_targets = real
        logits = logits_of(model, inputs, real.long())
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        nats += (loss * real_targets).sum(1).tolist()
        numbers += real_targets.sum(1).tolist()
        right += int(((logits.argmax(-1) == targets) & real_targets).sum())
    shares = {"accuracy": 100 * right / sum(numbers), "perplexity": math.exp(sum(nats) / sum(numbers))}
    return {**shares, "nats": [round(x, 2) for x in nats], "residues": numbers}
