"""`tarnn predict`: the labels of inputs, what their masks hide, what recordings say."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from typer import Argument, Option

from tarnn.cli.converted import is_converted, predict_converted
from tarnn.cli.generate import pick_device
from tarnn.data.files import field_of, is_file, is_table, lines_of, looks_like_path, read_rows
from tarnn.data.saved_tokenizer import check_ids
from tarnn.decoding.tokenizer import open_tokenizer
from tarnn.errors import UserError
from tarnn.tasks import TASKS, task_of
from tarnn.tasks.checkpoint import open_config, open_model
from tarnn.training.evaluation import trained

HEADING = "tarnn: the label, and after a tab the likeliest labels with their probabilities:"
PREDICTED = tuple(name for name, task in TASKS.items() if task.next == "predict")
INPUT = (
    "Texts, or files of them, also compressed: one on each line, or in each row of .jsonl, .csv and .tsv; - is stdin. For "
    "speech: wav files."
)


@torch.no_grad()
def predict(
    checkpoint: Annotated[Path, Argument(help="A folder that `tarnn train` or save_pretrained has written.")],
    inputs: Annotated[list[str], Argument(metavar="INPUT...", help=INPUT, show_default=False)],
    as_json: Annotated[bool, Option("--json", help="One JSON object per input, with all that is known.")] = False,
    text_field: Annotated[
        str | None, Option(help="The field of the text in .jsonl and .csv (default: as in training).")
    ] = None,
    top: Annotated[int, Option(min=1, help="How many labels, or tokens for a mask, to report.")] = 3,
    device: Annotated[str, Option(help="cpu, cuda, mps …; auto: an accelerator if there is one.")] = "auto",
) -> None:
    """Say what a trained model makes of each input: a line per input, in their order.

    Classification: the label with its probability, and the next likeliest. Masked text: the text with each <|mask|> filled.
    Nothing is written but the results; errors name the input.
    """
    if is_converted(checkpoint):
        texts = inputs_of(inputs, text_field or "text")
        show(lambda given: predict_converted(checkpoint, given, top, pick_device(device)), texts, as_json)
        return
    config = open_config(checkpoint, PREDICTED)
    task: Any = task_of(config.to_dict())
    model = open_model(checkpoint, tasks=PREDICTED, whole=True, device=pick_device(device))
    texts = iter(inputs)
    if task.reads_text:
        settings = trained(task, checkpoint, config, inputs).settings
        texts = inputs_of(inputs, text_field or settings.text_field)
        reader: Any = open_tokenizer(checkpoint)
        check_ids(np.array([*reader.backend_tokenizer.get_vocab().values()]), config.vocab_size)
    else:
        reader = front_end(checkpoint, config)
    show(lambda given: task.predict(model, reader, given, top), texts, as_json)


def show(predict: Callable[[Iterator[str]], Any], texts: Iterator[str], as_json: bool) -> None:
    """Print a line for each text, as soon as there is one; before lines with probabilities stderr says what they are."""
    seen: list[str] = []
    heading = not as_json

    def remembered() -> Iterator[str]:
        for text in texts:
            seen.append(text)
            yield text

    for row in predict(remembered()):
        text = seen.pop()
        if heading and "probabilities" in row:
            print(HEADING, file=sys.stderr, flush=True)
        heading = False
        print(json.dumps({"input": text, **row}, ensure_ascii=False) if as_json else line_of(row), flush=True)


def front_end(checkpoint: Path, config: Any) -> Any:
    from tarnn.huggingface.speech_features import open_front_end

    return open_front_end(checkpoint, config.input_size)


def inputs_of(inputs: list[str], field: str) -> Iterator[str]:
    """Texts themselves, and those of files and of stdin; UserError where one has none.

    The text of .jsonl and .csv rows is in the field, that of .tsv lines in the last column, as in training.
    """
    for each in inputs:
        if each == "-":
            texts: Iterable[str] = (check_text(line, "standard input").strip() for line in sys.stdin)
        elif is_file(each):
            texts = texts_of(Path(each), field)
        else:
            if looks_like_path(each):
                print(f"tarnn: there is no file {each}; it is taken as a text", file=sys.stderr, flush=True)
            texts = [check_text(each, "the input").strip()]
        found = False
        for text in filter(None, texts):
            found = True
            yield text
        if not found:
            raise UserError(f"the input {each!r} is empty; expected a text, or a file with one on each line.")


def check_text(text: str, name: str) -> str:
    """The text; UserError for one that was typed or piped as bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not text in UTF-8 ({text[error.start]!a} at position {error.start:,}).") from None
    return text


def texts_of(path: Path, field: str) -> Iterator[str]:
    """Yield the texts of a file, one for each row or line."""
    if not is_table(path):
        yield from (line.strip() for _, line in lines_of(path))
        return
    for place, row in read_rows(path):
        if isinstance(row, list):
            yield row[-1].strip()
        else:
            yield field_of(row, field, place, "--text-field").strip()


def line_of(row: dict[str, Any]) -> str:
    """A result for the eye: the output, and after a tab the probabilities of labels where there are any."""
    shares = row.get("probabilities")
    return row["output"] + ("\t" + ", ".join(f"{k} {v:.4f}" for k, v in shares.items()) if shares else "")
