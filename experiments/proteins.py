"""Language models of proteins: table 2 of the Performer paper, and its concatenated sequences of 8,192 residues, in small.

    python experiments/proteins.py --data FOLDER            # killed, it goes on
    python experiments/proteins.py --data FOLDER --quick

Unidirectional models guess the next residue, bidirectional ones the 15 % that are masked (of these, in training, a tenth is
another residue and a tenth the right one). Attention is all that differs: softmax; Performer-softmax, drawn once;
Performer-ReLU; elu + 1. Positions are added to the embedding, and nothing decays. Beside them stands the empirical
baseline, which knows how frequent each residue is and nothing else.

FOLDER holds uniprot_20k.fasta.gz and two families that are held out, globins45.fasta and Pkinase_PF00069_seed.sto. What is
named after these families, or shares three words of six residues with them, is left out of training. OOD ("out of
distribution") are sequences of these families; Test are some of the others that are not trained on.
Then: seconds and memory of a training step on concatenated sequences, 8,192 residues in one row.

Choromanski et al. 2021 (arXiv 2009.14794), section 4.4, appendix C.
"""

import math
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.clock import Contender, Effort, measure_in_turns
from scripts.common.loop import train
from scripts.common.options import parse
from scripts.common.plots import label, line, panels
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, mebibytes, milliseconds, page
from tarnn.data.proteins import AMINO_ACIDS, Protein, read_proteins
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
    "long": 8192,
    "data": Path,
    "runs": Path("runs/proteins"),
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
    "long": 256,
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
FAMILIES = ("globins45.fasta", "Pkinase_PF00069_seed.sto")
NAMED = ("globin", "protein kinase")
WORD, SHARED, MASKED, IGNORED = 6, 3, 0.15, -100
SEED_STRIDE = 1_000_000  # a seed's batches have numbers of their own
TOKENS = amino_tokenizer()
RESIDUES = len(AMINO_ACIDS)


class Data(NamedTuple):
    train: np.ndarray  # ids, sequences one after the other, each followed by the separator
    test: list[np.ndarray]
    ood: list[np.ndarray]
    facts: dict[str, int]


def main() -> int:
    only = {"only": list(ATTENTION), "directions": list(PAPER)}
    about = {"data": "the folder of the sequences", "runs": "where the runs are kept"}
    choices = {"only": list(ATTENTION), "directions": list(PAPER)}
    options = parse(__file__, __doc__, FULL | only, QUICK, choices=choices, about=about)
    return run(options, measure, results={"sequences": {}, "models": {}, "long": {}}, report=report, figure=figure)


def measure(options, results: dict[str, Any], keep) -> None:
    if options.data is None:
        raise Unmeasured("--data FOLDER says where the sequences are.")
    data = split(options)
    results["sequences"] = data.facts
    for direction in options.directions:
        found = results["models"].setdefault(direction, {"empirical": empirical(data)})
        for name in options.only:
            found[name] = trained(direction, name, data, options)
            keep()
    if options.long:
        results["long"] = long_steps(data, options)


def split(options) -> Data:
    """Training sequences, some that are held out at random, and the families that are."""
    families = [x for name in FAMILIES for x in read_proteins(options.data / name)]
    words = set().union(*(words_of(x.sequence) for x in families))
    everything, rest, strange = {}, [], []
    for protein in read_proteins(options.data / "uniprot_20k.fasta.gz"):
        everything.setdefault(protein.sequence, protein)
    for protein in everything.values():
        if any(name in protein.name.lower() for name in NAMED):
            strange.append(protein)
        elif len(words_of(protein.sequence) & words) < SHARED:
            rest.append(protein)
    random.Random(0).shuffle(rest)
    test, kept = rest[: options.test_sequences], rest[options.test_sequences :]
    random.Random(0).shuffle(ood := families + strange)
    row = np.concatenate([np.append(ids_of(x), TOKENS.eos_token_id) for x in kept])
    return Data(
        row,
        *([ids_of(x) for x in some] for x in (test, ood[: options.test_sequences]) for some in [x]),
        {
            "training": len(kept),
            "training residues": len(row) - len(kept),
            "test": len(test),
            "of held-out families": min(len(ood), options.test_sequences),
            "left out, like those": len(everything) - len(rest) - len(strange),
        },
    )


def words_of(sequence: str) -> set[str]:
    return {sequence[i : i + WORD] for i in range(len(sequence) - WORD + 1)}


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
        measure=lambda model: evaluate(direction, model, data.test[:50], options.context),
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
def evaluate(direction: str, model, rows: list[np.ndarray], context: int, batch_size: int = 8) -> dict[str, float]:
    """Accuracy in per cent and perplexity of the first `context` residues of each sequence, each read by itself."""
    nats, right, number = 0.0, 0, 0
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
        logits = logits_of(model, inputs, real.long())[real_targets]
        targets = targets[real_targets]
        nats += float(cross_entropy(logits, targets, reduction="sum"))
        right += int((logits.argmax(-1) == targets).sum())
        number += len(targets)
    return {"accuracy": 100 * right / number, "perplexity": math.exp(nats / number)}


def long_steps(data: Data, options) -> dict[str, Any]:
    """Seconds and memory of one training step on one row of `long` residues, sequences end to end."""
    contenders = {}
    for direction in options.directions:
        for name in options.only:
            model = build(direction, name, options)
            inputs, targets = task(direction, windows(data.train, options.long, 1, 0), torch.Generator().manual_seed(0))

            def step(model=model, inputs=inputs, targets=targets) -> None:
                logits = logits_of(model, inputs)
                cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
                model.zero_grad()

            contenders[f"{direction}, {name}"] = Contender(step, patience=2.0)
    effort = Effort(seconds=0.1, rounds=(1, 1)) if options.quick else Effort(seconds=4.0, rounds=(3, 5))
    return measure_in_turns(contenders, effort)


def report(options, facts, results: dict[str, Any]) -> str:
    tables = []
    for direction, found in results["models"].items():
        rows = []
        for name, one in found.items():
            paper = PAPER[direction].get(name, (None,) * 4)
            ours = [one[part][what] for part in ("test", "ood") for what in ("accuracy", "perplexity")]
            rows.append([name, *(f"{x:.2f}" for x in ours), *paper])
        header = [direction, *(f"{part} {what}" for part in ("Test", "OOD") for what in ("accuracy", "perplexity"))]
        tables.append(markdown([*header, *(f"paper: {x}" for x in header[1:])], rows))
    speed = [[name, milliseconds(timing), mebibytes(timing.peak_bytes, 0)] for name, timing in results["long"].items()]
    return page(
        "Language models of proteins, by attention",
        f"{options.layers} layers, hidden {options.hidden_size}, {options.heads} heads, {options.steps} steps of "
        f"{options.batch_size} × {options.context} residues; the paper: 36 layers, hidden 512, TrEMBL. "
        + ", ".join(f"{name}: {number:,}" for name, number in results["sequences"].items())
        + ". One run each.",
        *tables,
        markdown([f"a training step on {options.long:,} concatenated residues", "ms", "MiB"], speed) if speed else "",
    )


def figure(options, facts, results: dict[str, Any]):
    made, every = panels(len(results["models"]), height=4.2)
    for axes, (direction, found) in zip(every, results["models"].items()):
        for name, one in found.items():
            if "curve" in one:
                line(axes, [(x["step"], x["perplexity"]) for x in one["curve"]], ATTENTION[name][1], name)
        label(axes, "steps", "perplexity, 50 test sequences", scales="linear linear", title=direction, legend="")
    return made


if __name__ == "__main__":
    raise SystemExit(main())
