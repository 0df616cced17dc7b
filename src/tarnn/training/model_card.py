"""The model card in a folder that a command writes: README.md, with the head that the Hugging Face hub reads.

It states what the command knows, and nothing else. Its last line has a digest of the rest, so that a card which somebody wrote or
changed is left as it is.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tarnn.tasks import RunSettings, Task
from tarnn.training.checkpoints import RunState

CARD = "README.md"
MARK = "<!-- Written by tarnn, which replaces it only while nothing is changed. SHA-256 of what stands above: "
PIPELINES = {  # the hub's names of what a model does, by the end of its class's name
    "ForCausalLM": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForCTC": "automatic-speech-recognition",
    "ForImageGeneration": "unconditional-image-generation",
}
TAGS = {"linear": "linear-attention", "gated_delta": "gated-delta-rule", "softmax": "softmax-attention"}
PROCESSORS = {
    "tokenizer": ("tokenizer_config.json", "AutoTokenizer"),
    "front_end": ("preprocessor_config.json", "AutoFeatureExtractor"),
}
CACHED = re.compile(r"models--(.+?)--([^/\\]+)")  # a folder in the hub's cache
UNKNOWN = "transformers does not recognize the model type `tarnn` and asks for a newer version of itself, which does not help."
IGNORED = "transformers warns of an unknown quantization type, `tarnn`, and computes softmax attention."
LIMITS = "Nothing else was measured, and nobody has looked for wrong, unfair or harmful outputs."


def write_card(folder: Path, text: str, home: Path | None = None) -> None:
    """Write a card into a folder, but in the place of one that somebody else wrote or changed. home: where the files will go."""
    path = (home or folder) / CARD
    if not path.exists() or is_unchanged(path):
        (folder / CARD).write_text(f"{text}\n{MARK}{digest(text)} -->\n", encoding="utf-8", newline="\n")


def is_unchanged(path: Path) -> bool:
    """Whether a card is as `write_card` left it."""
    try:
        text, mark, end = path.read_text(encoding="utf-8").rpartition(f"\n{MARK}")
    except (OSError, UnicodeDecodeError):
        return False
    return bool(mark) and end == f"{digest(text)} -->\n"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def card_of_run(
    settings: RunSettings, task: Task, model: Any, described: dict[str, Any], state: RunState, rates: dict[str, float]
) -> str:
    """Return the card of a trained model. described: what `describe` returns; rates: of the best validation."""
    from tarnn.training.summary import measured, rows_of

    start, most = getattr(settings, "start", None), described["run"]["max_steps"]
    kinds = getattr(model.config, "attention", [])
    rows = {name: x for name, x in rows_of(settings, described, task).items() if name != "out"}
    for path in sorted({*local(settings.sources), *local([settings.val, start])}, key=len, reverse=True):
        rows = {name: x.replace(path, Path(path).name) for name, x in rows.items()}  # folders may tell who trained it
    limits = [f"It learned from these data alone{f', and from those of {start.name}' if start else ''}."]
    if hasattr(settings, "context"):
        limits.append(f"Its examples had {settings.context:,} tokens; longer ones were not tried.")
    if settings.max_minutes is None and state.step < most:
        limits.append(f"The run was stopped at step {state.step:,} of {most:,}.")
    return page(
        settings.out,
        settings.out.absolute().name,
        model,
        f"A model of {task.of}, trained by `tarnn train`.",
        base=start,
        tags=[TAGS.get(x, x.replace("_", "-")) for x in ([kinds] if isinstance(kinds, str) else kinds)],
        sources=settings.sources,
        rows=rows | {"trained": f"{state.step:,} steps in {state.seconds:,.0f} s, seed {settings.seed}"},
        measures=measured(task, state.best_measure, state.best_step, rates),
        limits=limits,
        command=f"tarnn {task.next}",
    )


def card_of_conversion(
    folder: Path, name: str, model: Any, checkpoint: Path, sources: Sequence[str], report: Any
) -> str:
    """Return the card of a model that was converted, or trained after that. checkpoint: what it was made of."""
    trained = report.options.get("train")
    about = "trained by `tarnn finetune`" if trained else "replaced by `tarnn convert`, without training"
    names = ", ".join(Path(x).name if x in local(sources) else x for x in sources)
    change = f"({report.hybrid - report.softmax:+.4f})"
    rows = {
        "made of": f"{hub_name(checkpoint) or checkpoint.absolute().name} ({type(model).__name__})",
        "model": f"{model.num_parameters():,} parameters",
        "texts": f"{names}: {report.texts:,} rows of {report.length:,} tokens, and {report.check_texts:,} to measure on",
        **{name.replace("_", " "): str(x) for name, x in report.options.items()},
    }
    if report.layers:
        rows["one sequence"] = f"{report.bytes:,} bytes of keys, values and sums; {report.softmax_bytes:,} with softmax"
    return page(
        folder,
        name,
        model,
        f"A model of transformers, whose attention was {about}.",
        base=checkpoint,
        tags=["linear-attention"],
        sources=sources,
        rows=rows,
        measures=f"{report.hybrid:.4f} {report.unit}; {report.softmax:.4f} {'before' if trained else 'with softmax'} {change}",
        limits=[f"Its rows had {report.length:,} tokens; longer ones were not tried."],
        command="tarnn generate" if model.can_generate() else "tarnn predict",
    )


def page(
    folder: Path,
    name: str,
    model: Any,
    about: str,
    *,
    base: Path | None,
    tags: Sequence[str],
    sources: Sequence[str],
    rows: Mapping[str, str],
    measures: str,
    limits: Sequence[str],
    command: str,
) -> str:
    """Return the text of a card. folder: where the files lie now; name: that of the folder when all is written."""
    kind = type(model).__name__
    end = f"For{kind.rpartition('For')[2]}"
    head = {
        "library_name": "tarnn",
        "pipeline_tag": PIPELINES.get(end),
        "base_model": base and hub_name(base),
        "tags": list(dict.fromkeys(["tarnn", *tags])),
        "datasets": [x.split(":")[1] for x in sources if x not in local(sources)],
    }
    weights = sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    rows = {**rows, "weights": f"{weights:,} bytes, {str(model.dtype).removeprefix('torch.')}"} if weights else rows
    table = "\n".join(f"| {key} | {x.replace('|', chr(92) + '|')} |" for key, x in rows.items())
    return f"""---
{yaml(head)}
---

# {name}

{about} What stands here is what the command knew. Add what the model is for, and its license.

## Load it

{loading(folder, name, kind, end)}
In a terminal: `{command} {name} …`. Without `import tarnn`, {UNKNOWN if kind.startswith("Tarnn") else IGNORED}

## Data, steps and size

| | |
| --- | --- |
{table}

## Measures

{measures[0].upper() + measures[1:]}.

## Limits

{chr(10).join(f"* {x}" for x in [*limits, LIMITS])}
"""


def yaml(head: Mapping[str, Any]) -> str:
    """Return what a head says; what is unknown is left out. A text in JSON is one in YAML."""
    return "\n".join(f"{key}: {json.dumps(x) if isinstance(x, list) else x}" for key, x in head.items() if x)


def loading(folder: Path, name: str, kind: str, end: str) -> str:
    """Return the lines of Python that load a model, with what reads its inputs."""
    import transformers

    model = f"AutoModel{end}" if hasattr(transformers, f"AutoModel{end}") else kind
    made = {"model": model} | {name: x for name, (file, x) in PROCESSORS.items() if (folder / file).exists()}
    autos = [x for x in made.values() if x != kind]
    lines = ["import tarnn  # makes the model known to transformers"]
    lines += [f"from tarnn.models import {kind}"] if model == kind else []
    lines += [f"from transformers import {', '.join(autos)}"] if autos else []
    lines += ["", f'name = "{name}"  # this folder, or owner/name on the hub']
    lines += [f"{key} = {x}.from_pretrained(name)" for key, x in made.items()]
    return "\n".join(["```python", *lines, "```", ""])


def local(sources: Sequence[Any]) -> list[str]:
    """Return the sources that are files or folders, as they were named."""
    return [str(x) for x in sources if x is not None and not str(x).startswith("datasets:")]


def hub_name(folder: Path) -> str | None:
    """Return owner/name of a folder in the hub's cache; None for any other, as its path does not tell."""
    found = CACHED.search(str(folder.absolute()))
    return found and f"{found[1]}/{found[2]}"
