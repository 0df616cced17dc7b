"""`tarnn transcribe`: what is said in a wav file, by a model that was trained with CTC."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from tarnn.cli.output import Output
from tarnn.errors import UserError


def transcribe(
    checkpoint: Annotated[Path, Argument(metavar="RUN", help="A folder of a CTC model, with its tokenizer.")],
    file: Annotated[Path, Argument(help="A mono wav file, sampled as often as the model's training data.")],
    beam: Annotated[int, Option(help="Search with so many prefixes; 1: the most likely path.", min=1, max=1000)] = 1,
    stream: Annotated[
        bool, Option(help="Write letters as soon as they are heard, in constant memory (causal models).")
    ] = False,
    chunk: Annotated[float, Option(help="With --stream: seconds read at a time.", min=0.01, max=60)] = 0.5,
) -> None:
    """Write what is said in FILE, by the model in RUN.

    The folder holds a `TarnnForCTC`, its front end (preprocessor_config.json) and its tokenizer, as `tarnn train --task ctc`
    and `experiments/speech.py` leave them.
    """
    import torch

    from tarnn.tasks.speech.ctc import beam_search, best_path
    from tarnn.tasks.speech.recordings import read_wav

    model, front, tokenizer = open_speech(checkpoint)
    samples, rate = read_wav(file)
    front.check(samples, rate, str(file))
    output = Output()
    if stream:
        if beam > 1:
            raise UserError("--beam looks at a whole utterance and --stream writes before its end; give one of them.")
        if not model.config.causal:
            raise UserError(
                f"{checkpoint} holds a model that sees both sides, so it needs the whole file; leave --stream out."
            )
        ids: list[int] = []
        for ids_of_chunk in heard(model, front, samples, round(chunk * rate)):
            output.write(letters(tokenizer, ids_of_chunk))
            ids += ids_of_chunk
    else:
        frames = torch.from_numpy(front.frames(samples))[None]
        with torch.no_grad():
            logits = model(input_features=frames).logits[0].float()
        ids = best_path(logits.numpy()) if beam == 1 else beam_search(logits.log_softmax(-1).double().numpy(), beam)
        output.write(letters(tokenizer, ids))
    output.write("\n")
    if not ids:
        print(
            f"tarnn: the model heard no letter in {file}; one that was trained little does so (`tarnn eval` measures how many "
            "letters are wrong)",
            file=sys.stderr,
        )


def heard(model: Any, front: Any, samples: Any, size: int) -> Iterator[list[int]]:
    """The symbols of each stretch of `size` samples, as they are heard: a state of constant size and a few samples are kept.

    Frames overlap, so the samples that the next frame needs are kept; frames are handed on `subsampling` at a time.
    """
    import numpy as np
    import torch

    from tarnn.tasks.speech.ctc import best_path

    state, last = model.new_state(1, capacity=len(samples) // front.hop_length + 1), 0
    waiting, together = np.zeros(0, np.float32), model.config.subsampling
    for start in range(0, len(samples), size):
        waiting = np.concatenate([waiting, samples[start : start + size]])
        count = max(0, 1 + (len(waiting) - front.frame_length) // front.hop_length)
        count = count if start + size >= len(samples) else count - count % together  # the last may be filled up
        if count < 1:
            continue
        used = waiting[: (count - 1) * front.hop_length + front.frame_length]
        logits, state = model.prefill(torch.from_numpy(front.frames(used))[None], state, inplace=True)
        waiting = waiting[count * front.hop_length :]
        row = logits[0].numpy()
        yield best_path(row, last)
        last = int(row[-1].argmax())


def letters(tokenizer: Any, ids: list[int]) -> str:
    """As text; the delimiter of words is a space."""
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return "".join(" " if x == tokenizer.word_delimiter_token else x for x in tokens)


def open_speech(checkpoint: Path) -> tuple[Any, Any, Any]:
    """The model, its front end and its tokenizer; UserError where one is missing or can't be read."""
    from tarnn.data.saved_tokenizer import open_saved_tokenizer
    from tarnn.huggingface.speech_features import open_front_end
    from tarnn.tasks.checkpoint import open_model

    if checkpoint.is_file():
        raise UserError(f"{checkpoint} is a file; name the model's folder before it: tarnn transcribe RUN FILE.")
    for name in ("config.json", "preprocessor_config.json", "vocab.json"):
        if not (checkpoint / name).is_file():
            raise UserError(
                f"{checkpoint} holds no model of speech: it has no {name}. `tarnn train --task ctc` makes one."
            )
    model = open_model(checkpoint, tasks=("ctc",), whole=True)
    front = open_front_end(checkpoint, model.config.input_size)
    tokenizer = open_saved_tokenizer(checkpoint, model.config)
    if not hasattr(tokenizer, "word_delimiter_token"):
        raise UserError(
            f"{checkpoint} holds a tokenizer of text ({type(tokenizer).__name__}); expected one of letters that are heard "
            "(Wav2Vec2CTCTokenizer)."
        )
    return model, front, tokenizer
