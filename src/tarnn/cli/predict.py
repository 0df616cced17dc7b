"""`tarnn predict`: what a trained model says of inputs: their labels, what their masks hide, what they become."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from typer import Argument, Option

from tarnn.cli.generate import pick_device
from tarnn.errors import UserError
from tarnn.generation.checkpoint import open_config, open_model, open_tokenizer
from tarnn.tasks import TASKS, task_of

PREDICTED = tuple(name for name, task in TASKS.items() if task.next == "predict")
INPUT = "Texts, or files with one on each line (also compressed); - is stdin. For speech: files of sound or of features."


@torch.no_grad()
def predict(
    checkpoint: Annotated[Path, Argument(help="A folder that `tarnn train` or save_pretrained has written.")],
    inputs: Annotated[list[str], Argument(metavar="INPUT...", help=INPUT, show_default=False)],
    as_json: Annotated[
        bool, Option("--json", help="One JSON object per input, with all that is known.")
    ] = False,
    top: Annotated[int, Option(min=1, help="How many labels, or tokens for a mask, to report.")] = 3,
    device: Annotated[str, Option(help="cpu, cuda, mps …; auto: an accelerator if there is one.")] = "auto",
) -> None:
    """Say what a trained model makes of each input: a line per input, in their order.

    Classification: the label with its probability, and the next likeliest. Masked text: the text with each <|mask|> filled.
    Sequence to sequence: what the input becomes. Nothing is written but the results; errors name the input.
    """
    config = open_config(checkpoint, PREDICTED)
    task: Any = task_of(config.to_dict())
    model = open_model(checkpoint, tasks=PREDICTED, whole=True, device=pick_device(device))
    texts = inputs_of(inputs) if task.reads_text else inputs
    seen: list[str] = []

    def remembered() -> Iterator[str]:
        for text in texts:
            seen.append(text)
            yield text

    reader = open_tokenizer(checkpoint) if task.reads_text else front_end(checkpoint, config)
    for row in task.predict(model, reader, remembered(), top):
        text = seen.pop()
        print(json.dumps({"input": text, **row}, ensure_ascii=False) if as_json else line_of(row), flush=True)


def front_end(checkpoint: Path, config: Any) -> Any:
    from tarnn.models.speech_features import open_front_end

    return open_front_end(checkpoint, config.input_size)


def inputs_of(inputs: list[str]) -> Iterator[str]:
    """Texts themselves, and the lines of files and of stdin, without those that are blank; UserError where none is left."""
    from tarnn.data.files import opened

    for each in inputs:
        found = False
        if each == "-":
            for line in filter(None, (line.strip() for line in sys.stdin)):
                found = True
                yield line
        elif Path(each).is_file():
            with opened(Path(each)) as lines:
                for number, line in enumerate(lines, start=1):
                    try:
                        text = line.decode().strip()
                    except UnicodeDecodeError:
                        raise UserError(
                            f"{each}, line {number} is not UTF-8; expected a text on each line."
                        ) from None
                    if text:
                        found = True
                        yield text
        elif each.strip():
            found = True
            yield each
        if not found:
            raise UserError(f"the input {each!r} is empty; expected a text, or a file with one on each line.")


def line_of(row: dict[str, Any]) -> str:
    """A result for the eye: the output, and after a tab the probabilities of labels where there are any."""
    shares = row.get("probabilities")
    return row["output"] + ("\t" + ", ".join(f"{k} {v:.4f}" for k, v in shares.items()) if shares else "")
