"""`tarnn`: the list of subcommands, and what becomes of errors. Each subcommand is a module of its own."""

import importlib
import inspect
import os
import sys
import traceback
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from tarnn._version import __version__
from tarnn.cli.output import CONTROL
from tarnn.cli.threads import stay_within_quota, wait_briefly
from tarnn.errors import OneProcessError, is_out_of_memory
from tarnn.extras import needed_for
from tarnn.removed import message_of_command

# name of the subcommand, of its module here and of the function there → its line in `tarnn --help`
COMMANDS = {
    "train": "Train a model of text, images, labels or transcripts: files, folders, stdin, a dataset, pictures …",
    "generate": "Continue a prompt or draw images with a trained model, as an RNN: constant time and memory per token.",
    "serve": "Serve models over HTTP, to clients of OpenAI's API: streams, states that are kept, many texts at once.",
    "pack": "Make one file of a model: it opens at once, by mapping, and processes share its memory.",
    "export": "Write a model for other programs: transformers, fla and what reads their folders, or onnxruntime.",
    "convert": "Give a pretrained softmax model window, sinks and features: calibrated on texts, nothing is trained.",
    "finetune": "Tune a model of a folder on your data: adapters in PEFT's format, or all weights.",
    "tune-state": "Tune the states before the first token on your data: a file that costs nothing per token.",
    "predict": "Classify texts, fill masked ones or transcribe, with a trained model.",
    "eval": "Measure a model on held-out data: bits per byte, accuracy, error rates, bits per dimension.",
    "check": "Check that a model gives the same logits alone, padded, in a batch, with a cache, step by step.",
    "info": "Say what tarnn runs on here, or what a checkpoint holds: parameters, layers, bytes of state.",
    "transcribe": "Write what is said in a wav file, whole or as a stream.",
    "show": "Look into a model's attention for one input: a page to look around in, and plots.",
    "demo": "Train, generate and measure, in a few minutes: what this project is about.",
}

LONGEST = 600  # characters of an error

EXAMPLES = {
    "train": "tarnn train my-books/ --out runs/books",
    "generate": "tarnn generate runs/books --prompt 'Call me'",
    "serve": "tarnn serve runs/books",
    "pack": "tarnn pack qwen3.5/ qwen3.5.tarnn --weights int8",
    "export": "tarnn export runs/books --format hf --out books-qwen/",
    "convert": "tarnn convert llama/ converted/ --texts my-books/",
    "finetune": "tarnn finetune qwen3.5/ chats.jsonl --out adapter/ --lora 16",
    "tune-state": "tarnn tune-state qwen3.5/ examples.jsonl --out french.state",
    "predict": "tarnn predict runs/reviews 'A fine film.' other_texts.txt",
    "eval": "tarnn eval runs/books book.txt",
    "check": "tarnn check qwen3.5/ --weights int8",
    "info": "tarnn info runs/books",
    "transcribe": "tarnn transcribe runs/speech seven.wav",
    "show": "tarnn show runs/books --input 'Call me Ishmael' --out attention/",
    "demo": "tarnn demo --out runs/demo",
}


def help_of(docstring: str, example: str) -> str:
    """A docstring as help: each paragraph on one line, for the terminal to break; at the end an example."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join([*(" ".join(each.split()) for each in paragraphs), f"Example: {example}"])


def function_of(command: str) -> Any:
    """Import what a subcommand runs."""
    name = command.replace("-", "_")
    return getattr(importlib.import_module(f"tarnn.cli.{name}"), name)


class LazyCommand(TyperCommand):
    """A subcommand whose module is imported when it runs, so that `tarnn --help` stays quick."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        assert self.name is not None
        wait_briefly()
        stay_within_quota()
        function = function_of(self.name)
        app = typer.Typer(add_completion=False)
        app.command(name=self.name, help=help_of(function.__doc__ or "", EXAMPLES[self.name]))(function)
        return typer.main.get_command(app).make_context(info_name, args, parent, **extra)


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"tarnn {__version__}")
        raise typer.Exit()


def build_app() -> TyperGroup:
    """The group of all subcommands, none of them imported yet."""

    def root(
        version: bool = typer.Option(
            False, "--version", callback=print_version, is_eager=True, help="Print the version."
        ),
    ) -> None:
        """Transformers as RNNs: trained in time linear in the length, run from a state of fixed size."""

    app = typer.Typer(cls=TyperGroup, add_completion=False, rich_markup_mode=None)
    app.callback()(root)
    group = typer.main.get_group(app)
    for name, text in COMMANDS.items():
        group.add_command(LazyCommand(name, help=text, short_help=text))
    return group


def is_ours(error: BaseException) -> bool:
    """Raised by a line of tarnn itself: then its text was written for the user."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).split(".")[0] == "tarnn"


def is_of_transformers(error: BaseException) -> bool:
    """Raised by the code of a model or a tokenizer of transformers as it ran: its files ask for what that can't do."""
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    kinds = ("transformers.models.", "transformers.tokenization")
    last = next((name for name in reversed(modules) if name.startswith(("tarnn.", *kinds))), "")
    return last.startswith(kinds)


def fail(message: object) -> int:
    """One line on stderr, and exit code 2. Of several processes the first speaks, and any with an error of its own."""
    if os.environ.get("RANK", "0") == "0" or isinstance(message, OneProcessError):
        text = " ".join(str(message).split()).translate(CONTROL)
        if len(text) > LONGEST:  # it quotes a file
            text = f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
        line = f"tarnn: error: {text}"
        # names may hold bytes that are no text
        print(line.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
    return 2


def fail_of_model(error: Exception) -> int:
    """Report an error that the code of transformers raised over a model; any other error is a bug, and is raised again."""
    if os.environ.get("TARNN_TRACEBACK") or not is_of_transformers(error):
        raise error
    reason = str(error)[:300].rstrip(". ") or type(error).__name__
    return fail(
        f"the model or its tokenizer can't run: {reason}. Its files may not fit each other or this input; TARNN_TRACEBACK=1 "
        "shows where it stopped."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code: 0, 1 for a failed `check`, 2 for what the user can mend, 130 for Ctrl-C.

    `UserError`, a `ValueError` raised by tarnn's own code, any `OSError` and a lack of memory become one line on stderr;
    so does whatever the code of a foreign model raises while it runs.
    Everything else is a bug and keeps its traceback; TARNN_TRACEBACK=1 keeps it for all of them.
    """
    argv = sys.argv[1:] if argv is None else argv
    if gone := message_of_command(argv):
        return fail(gone)
    try:
        with needed_for(" ".join(["tarnn", *argv[:1]])):
            code = build_app().main(argv or ["--help"], prog_name="tarnn", standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except TyperException as error:
        command = " ".join(["tarnn", *argv[: bool(argv and argv[0] in COMMANDS)]])
        # typer reads values by pydantic, which begins with the kind of its error
        message = error.format_message().replace("Value error, ", "")
        stop = "" if message.endswith((".", "?")) else "."
        return fail(f"{message}{stop} See `{command} --help`.")
    except (OSError, ValueError) as error:
        if os.environ.get("TARNN_TRACEBACK") or not (isinstance(error, OSError) or is_ours(error)):
            return fail_of_model(error)
        return fail(error)
    except Exception as error:
        if os.environ.get("TARNN_TRACEBACK") or not is_out_of_memory(error):
            return fail_of_model(error)
        return fail(f"there is not enough memory for this: {str(error).splitlines()[0]}. Ask for less at once.")
    if code == 130:
        print("tarnn: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0
