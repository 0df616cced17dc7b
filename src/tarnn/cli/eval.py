"""`tarnn eval`: what data cost a trained model: bits per byte, accuracy, error rates, bits per dimension."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from tarnn.checkpoint_keys import MODEL_TYPES
from tarnn.cli.converted import is_converted
from tarnn.cli.formats import next_command
from tarnn.cli.generate import Weights, pick_device
from tarnn.cli.progress import progress
from tarnn.errors import UserError
from tarnn.log import Log, silent

# in a batch: larger ones are no faster on a CPU, and take more memory
TOKENS_AT_ONCE, LOGITS_AT_ONCE = 1 << 13, 1 << 25
COLUMNS = 80
SOURCES = "What to measure on, of the kinds that `tarnn train` takes; left out, what the run itself held out."


def eval(
    checkpoint: Annotated[
        Path,
        Argument(
            metavar="RUN",
            help="A folder of `tarnn train` or `tarnn convert`, a causal model of transformers, or a packed file.",
        ),
    ],
    data: Annotated[list[str] | None, Argument(metavar="[DATA]...", help=SOURCES, show_default=False)] = None,
    as_json: Annotated[bool, Option("--json", help="As JSON, for programs.")] = False,
    context: Annotated[
        int | None, Option(min=1, help="Of a text: tokens in a window (default: as in training; others 1,024).")
    ] = None,
    batch_size: Annotated[int | None, Option(min=1, help="Examples at once (default: as suits the model).")] = None,
    text_field: Annotated[str | None, Option(help="The field of the text in .jsonl (default: as in training).")] = None,
    label_field: Annotated[str | None, Option(help="The field of the label (default: as in training).")] = None,
    weights: Annotated[
        Weights | None, Option(help="Of a text: measure the fused step that `generate --weights` takes.")
    ] = None,
    device: Annotated[str, Option(help="cpu, cuda, mps …; auto: an accelerator if there is one.")] = "auto",
    quiet: Annotated[bool, Option("--quiet", "-q", help="The result only, nothing on stderr.")] = False,
) -> None:
    """Measure a trained model on data that it has not seen: its run's own held-out data, or yours.

    A text: bits per byte, and perplexity per token. Labelled texts: accuracy and a table of which label was taken for
    which. Recordings: errors per letter and per word. Images: bits per dimension. Masked text: bits per token, accuracy.
    """
    where = pick_device("cpu" if weights else device)
    report = silent if quiet else partial(print, file=sys.stderr, flush=True)
    options = {"context": context, "text_field": text_field, "label_field": label_field}
    facts = measure(checkpoint, data or [], where, options, batch_size, report, weights)
    print(json.dumps(facts, indent=2, ensure_ascii=False) if as_json else as_text(facts))


def measure(
    checkpoint: Path,
    sources: list[str],
    device: Any,
    options: dict[str, Any],
    batch_size: int | None,
    report: Log,
    weights: Weights | None = None,
) -> dict[str, Any]:
    """All that the command tells, as JSON has it."""
    from tarnn.decoding.logits import OpenedLogits
    from tarnn.families.by_name import FAMILIES
    from tarnn.json_file import read_json
    from tarnn.matmul import fast_matmul, product_size
    from tarnn.tasks import TASKS
    from tarnn.training.evaluation import evaluate

    file = checkpoint / "config.json"
    kind = read_json(file).get("model_type") if file.is_file() else None
    ours = not file.is_file() or kind in [*MODEL_TYPES, *(task.model_type for task in TASKS.values())]
    by_program = not ours and isinstance(kind, str) and kind in FAMILIES and device.type == "cpu"
    by_program = checkpoint.is_file() or (by_program and not is_converted(checkpoint))
    opened = open_program(checkpoint, sources, options, weights, report) if by_program else None
    if opened is None and ours:
        opened = open_ours(checkpoint, sources, device, options, weights, report)
    elif opened is None:
        opened = open_other(checkpoint, sources, device, options, report)
    model, task, about = opened
    report(f"tarnn: {checkpoint} on {device}: {about['data']}")
    length = example_length(model.config, task)
    if not isinstance(model, OpenedLogits) and (
        weights or (not ours and device.type == "cpu" and not is_converted(checkpoint))
    ):
        model = by_step(model, about["task"], weights, report)
    batch_size = batch_size or rows_at_once(model.config, length)
    batches = task.validation(batch_size)
    track = partial(track_batches, report=report)
    if isinstance(model, OpenedLogits):
        report(f"tarnn: products of the {model.opened.about[0]}")
        return {"checkpoint": str(checkpoint), **about, **evaluate(task, model, batches, track)}
    with fast_matmul(product_size(model, batch_size * length)) as products:
        report(f"tarnn: float32 products: {products.why}")
        return {"checkpoint": str(checkpoint), **about, **evaluate(task, model, batches, track)}


def by_step(model: Any, task: str, weights: Weights | None, report: Log) -> Any:
    """Return the model with logits of its fused step; where it has none, the model itself, with tarnn's ops in linear layers.

    Raises UserError where weights are given and it has none.
    """
    from tarnn.conversion.opening import patch
    from tarnn.decoding.logits import OpenedLogits
    from tarnn.decoding.opening import open_step

    if task != "text":
        raise UserError("--weights is for language models; leave it out.")
    try:
        return OpenedLogits(open_step(model, weights))
    except ValueError as error:  # Refusal, or UserError
        if weights:
            raise UserError(f"--weights {weights}: {error}") from error
        report(f"tarnn: computed by transformers: {error}")
    patch(model, report)
    return model


def open_ours(
    checkpoint: Path, sources: list[str], device: Any, options: dict[str, Any], weights: Weights | None, report: Log
) -> tuple[Any, Any, dict[str, Any]]:
    """A model that `tarnn train` made, and its task with the data. A text is measured by the model's program, on a CPU."""
    from tarnn.tasks import TASKS, task_of
    from tarnn.tasks.checkpoint import SavedConfig, open_model, open_record
    from tarnn.training.evaluation import trained

    config = open_record(checkpoint, tuple(TASKS))
    kind = task_of(config.to_dict())
    assert kind is not None
    if weights and kind.name != "text":
        raise UserError("--weights is for language models; leave it out.")
    record = config.model if isinstance(config, SavedConfig) else config
    known = trained(kind, checkpoint, record, sources, **options)
    task = kind.to_evaluate(known, sources, report)
    model = logits_of(checkpoint, weights, report) if kind.name == "text" and device.type == "cpu" else None
    if model is None:
        model = open_model(checkpoint, tasks=(kind.name,), whole=True, device=device)
    command = next_command(kind.next, checkpoint, task.example, is_path=not kind.reads_text)
    return model, task, {"task": kind.name, "data": task.evaluated, "next": command}


def open_other(
    checkpoint: Path, sources: list[str], device: Any, options: dict[str, Any], report: Log
) -> tuple[Any, Any, dict[str, Any]]:
    """A causal model of transformers, converted or not, and a text."""
    from tarnn.conversion.evaluation import is_causal_lm
    from tarnn.conversion.opening import open_pretrained, tokenizer_of
    from tarnn.conversion.rows import most_positions

    documents = documents_of(checkpoint, sources, options, report)
    model = open_pretrained(checkpoint, text_only=True, report=report).to(device)
    if not is_causal_lm(model):
        raise UserError(
            f"{checkpoint} holds a {type(model).__name__}; of models of transformers `tarnn eval` measures those that guess the "
            "next token (causal language models)."
        )
    tokenizer = tokenizer_of(checkpoint, model)
    task, about = text_of(tokenizer, documents, most_positions(model), model.config.vocab_size, sources, options)
    return model, task, about | ({"next": next_command("generate", checkpoint)} if is_converted(checkpoint) else {})


def open_program(
    checkpoint: Path, sources: list[str], options: dict[str, Any], weights: Weights | None, report: Log
) -> tuple[Any, Any, dict[str, Any]] | None:
    """A model that `open_step` opens without transformers, and a text; None where it does not."""
    from tarnn.decoding.lm import tokenizer_in

    documents = documents_of(checkpoint, sources, options, report)
    model = logits_of(checkpoint, weights, report)
    if model is None:
        return None
    limits = model.config
    tokenizer = tokenizer_in(checkpoint, limits.vocab_size)
    task, about = text_of(tokenizer, documents, limits.max_position_embeddings, limits.vocab_size, sources, options)
    return model, task, about


def logits_of(checkpoint: Path, weights: Weights | None, report: Log) -> Any:
    """The logits of a model's program; None where it has none that runs, and nobody wanted other weights."""
    from tarnn.decoding.logits import OpenedLogits
    from tarnn.decoding.opening import open_step

    try:
        return OpenedLogits(open_step(checkpoint, weights, report=report))
    except ValueError as error:  # Refusal, or UserError
        if weights:
            raise UserError(f"--weights {weights}: {error}") from error
        if checkpoint.is_file():
            raise
        return None


def documents_of(checkpoint: Path, sources: list[str], options: dict[str, Any], report: Log) -> list[Any]:
    """The texts to measure on. UserError where none is named, and for options that are about labels."""
    from tarnn.data.sources import read_documents

    if not sources:
        raise UserError(f"{checkpoint} is of no run that held data out. Name a text: `tarnn eval {checkpoint} TEXT`.")
    if wrong := [name for name in ("label_field",) if options[name] is not None]:
        raise UserError(f"--{wrong[0].replace('_', '-')} does not go with a model of text; leave it out.")
    return [*read_documents(sources, text_field=options["text_field"] or "text", log=report)]


def text_of(
    tokenizer: Any, documents: list[Any], most: int | None, vocab_size: int, sources: list[str], options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The task of a text, and facts about it. most: tokens that the model reads."""
    from tarnn.tasks.text.pretrained import PretrainedText, context_length

    task = PretrainedText(tokenizer, documents, context_length(most, options["context"], "--context"), vocab_size)
    data = f"{', '.join(sources)}: {len(task.ids):,} tokens in windows of {task.context:,}"
    return task, {"task": "text", "data": data}


def example_length(config: Any, task: Any) -> int:
    """Tokens of an example; a guess where they differ."""
    named = [(config, "sequence_length"), (task, "validation_context"), (task, "context")]
    return next((length for owner, name in named if (length := getattr(owner, name, None))), 512)


def rows_at_once(config: Any, length: int) -> int:
    """Examples of a batch that suits the memory."""
    return max(1, min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // max(1, config.vocab_size)) // length)


def track_batches(batches: Any, total: int, report: Log) -> Any:
    return progress((batches[i] for i in range(total)), total, "batches measured", report)


def as_text(facts: dict[str, Any]) -> str:
    """Format the facts as a page."""
    rows = {"model": f"{facts['checkpoint']} ({facts['task']})", "data": facts["data"]}
    rows |= {name.replace("_", " "): number(name, x) for name, x in facts.items() if isinstance(x, float)}
    error = rows.pop("standard error", None)
    if error:
        rows["bits per dim"] += f" ± {error} (standard error)"
    lines = [f"{name:>17}  {value}" for name, value in rows.items()]
    if "confusion" in facts:
        lines += ["", *confusion_lines(facts["labels"], facts["confusion"]), ""]
    return "\n".join([*lines, f"{'next':>17}  {facts['next']}"] if "next" in facts else lines)


def number(name: str, x: float) -> str:
    return f"{x:,.2f} per token" if name == "perplexity" else f"{x:.4f}"


def confusion_lines(labels: list[str], table: list[list[int]]) -> list[str]:
    """A row for each label, a column for each guess; of a table wider than a terminal the most frequent mistakes."""
    first = max(12, *(len(label) for label in labels))
    width = max(len(x) for x in (*labels, *(f"{n:,}" for row in table for n in row))) + 2
    if first + width * len(labels) <= COLUMNS:
        head = " " * first + "".join(f"{label:>{width}}" for label in labels)
        rows = (f"{label:>{first}}" + "".join(f"{n:{width},}" for n in row) for label, row in zip(labels, table))
        return [f"{'label':>{first}}  what was predicted", head, *rows]
    wrong = [(n, labels[i], labels[j]) for i, row in enumerate(table) for j, n in enumerate(row) if n and i != j]
    wrong.sort(key=lambda x: -x[0])
    return ["most frequent mistakes"] + [f"{n:8,} × {true} taken for {guess}" for n, true, guess in wrong[:10]]
