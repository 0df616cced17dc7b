"""`tarnn show`: the attention of a model for one input, as a page to look around in and as plots."""

import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from tarnn.cli.converted import is_converted
from tarnn.errors import UserError

PAGE, ARRAYS = "attention.html", "attention.npz"
SIGNS = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})


def show(
    checkpoint: Annotated[Path, Argument(help="A checkpoint folder with its tokenizer.")],
    source: Annotated[str, Option("--input", help="A text, a file of text, or a FASTA or Stockholm file of proteins.")],
    out: Annotated[Path, Option(help="The folder for the page and the plots.")],
    record: Annotated[int, Option(help="Which sequence of a FASTA or Stockholm file, from 1 on.", min=1)] = 1,
    max_tokens: Annotated[int, Option(help="Only the first so many tokens are shown.", min=1, max=2048)] = 256,
    attention: Annotated[
        str | None,
        Option(help="For a model of transformers: sdpa (softmax), tarnn_hybrid or tarnn_linear (default: its own)."),
    ] = None,
) -> None:
    """Look into a model's attention: which token reads from which, by layer and head, for one input.

    CHECKPOINT is a model of tarnn's or of transformers, with its tokenizer. In --out it leaves attention.html, a page
    that works offline (pick a layer, a head, a token), a plot per layer, and the weights as attention.npz.
    """
    import numpy as np
    import torch

    from tarnn.analysis.attention_maps import attention_maps
    from tarnn.analysis.attention_page import attention_page
    from tarnn.analysis.plots import attention_figure
    from tarnn.data.saved_tokenizer import check_ids

    attention = attention or ("tarnn_hybrid" if is_converted(checkpoint) else "sdpa")
    model, tokenizer = open_any(checkpoint, attention)
    text = read_input(source, record)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=True)["input_ids"]
    check_ids(ids, model.config.vocab_size)
    if not ids.shape[1]:
        raise UserError("--input is empty; expected a text of at least one token.")
    if ids.shape[1] > max_tokens:
        print(
            f"the input has {ids.shape[1]:,} tokens; the first {max_tokens:,} are shown (--max-tokens).",
            file=sys.stderr,
        )
        ids = ids[:, :max_tokens]
    tokens = [str(tokenizer.decode([i])).translate(SIGNS) or "∅" for i in ids[0].tolist()]
    maps = attention_maps(model, input_ids=ids, **({"use_cache": False} if is_causal(model) else {}))
    out.mkdir(parents=True, exist_ok=True)
    (out / PAGE).write_text(attention_page(maps, tokens, f"Attention of {checkpoint.name}"), encoding="utf-8")
    arrays: dict[str, Any] = {"tokens": np.array(tokens)}
    for i, one in enumerate(maps):
        weights = one.weights()[0].float()
        attention_figure(weights, tokens, f"layer {i}: {one.name}").savefig(out / f"layer-{i}.png")
        arrays[one.name] = weights.to(torch.float16).cpu().numpy()
    np.savez_compressed(out / ARRAYS, **arrays)
    print(out / PAGE)


def open_any(checkpoint: Path, attention: str) -> tuple[Any, Any]:
    """The backbone in a folder, of tarnn or of transformers, and its tokenizer. Only local data are read."""
    from tarnn.analysis.attention_maps import FUNCTIONS
    from tarnn.conversion.opening import open_pretrained, read_config
    from tarnn.data.saved_tokenizer import open_saved_tokenizer
    from tarnn.tasks import TASKS, task_of
    from tarnn.tasks.checkpoint import open_model

    if attention not in FUNCTIONS:
        raise UserError(f"--attention is {' or '.join(FUNCTIONS)}; got {attention!r}.")
    fields = read_config(checkpoint)
    task = task_of(fields)
    if fields.get("is_encoder_decoder") or fields.get("input_size") is not None or (task and not task.reads_text):
        raise UserError(
            f"{checkpoint} holds a model that reads more than one text (an encoder with a decoder) or frames of sound; use "
            "tarnn.analysis.attention_maps in Python."
        )
    if task is None:
        model = open_pretrained(checkpoint, attention=attention)
    else:
        model = open_model(checkpoint, tasks=tuple(TASKS), whole=True)
    return model.base_model, open_saved_tokenizer(checkpoint, model.config)


def is_causal(model: Any) -> bool:
    """Whether a call takes use_cache."""
    return bool(getattr(model, "causal", hasattr(model.config, "use_cache")))


def read_input(source: str, record: int) -> str:
    """The text itself, or that of the file of this name."""
    from tarnn.cli.predict import check_text
    from tarnn.data.files import is_file, looks_like_path
    from tarnn.data.proteins import is_protein_file, read_proteins

    if not is_file(source):
        if looks_like_path(source):
            print(f"tarnn: there is no file {source}; it is taken as a text", file=sys.stderr)
        return check_text(source, "--input")
    path = Path(source)
    if is_protein_file(path):
        for number, protein in enumerate(read_proteins(path), start=1):
            if number == record:
                print(f"{protein.name}, {len(protein.sequence):,} residues", file=sys.stderr)
                return protein.sequence
        raise UserError(f"{path} holds {number} sequences; --record {record} is not among them.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start:,}).") from error
