"""A prompt from the command line, a file or stdin, as bytes and then as ids."""

import os
import stat
import sys
from pathlib import Path

import torch
from torch import Tensor

from tarnn.data.saved_tokenizer import check_ids
from tarnn.data.tokenizers import encode
from tarnn.errors import UserError


def read_prompt(prompt: str | None, prompt_file: str | None, state_in: Path | None) -> bytes:
    """The prompt's bytes: the argument, a file or stdin, whichever was given; none at all is an empty one."""
    if prompt is not None and prompt_file is not None:
        raise UserError("--prompt and --prompt-file were both given; give one of them.")
    if prompt is not None:
        return prompt.encode("utf-8", "surrogateescape")  # the bytes that were typed
    if prompt_file is None and (state_in is not None or not is_piped(sys.stdin)):
        return b""
    if prompt_file in (None, "-"):
        if sys.stdin is None:
            raise UserError("stdin is closed, so there is no prompt in it; give --prompt or --prompt-file.")
        return sys.stdin.buffer.read()
    try:
        return Path(prompt_file).read_bytes()
    except OSError as error:
        raise UserError(
            f"the prompt can't be read from {prompt_file}: {error.strerror}. Give a file, or --prompt."
        ) from error


def is_piped(stream) -> bool:
    """A pipe or a file, so there is an end to wait for; not a terminal, a device or nothing at all."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def prompt_ids(tokenizer, text: bytes, model, *, starts: bool) -> Tensor:
    """(1, t) ids. An empty prompt at the start of a sequence is the separator that documents begin with."""
    ids = torch.from_numpy(encode(tokenizer, text, "the prompt"))
    if starts and not len(ids):
        separator = tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        if separator is None:
            raise UserError("the prompt is empty and this tokenizer has no separator to start from; give a --prompt.")
        ids = torch.tensor([separator])
    check_ids(ids, model.config.vocab_size)
    return ids[None].to(model.device)
