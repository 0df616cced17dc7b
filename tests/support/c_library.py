"""The C interface of the runtime (csrc/runtime/tarnn.h) as Python calls it."""

import ctypes
import os
from pathlib import Path

import torch

from tarnn.kernels.cpu import library

BINARY = Path(os.environ.get("TARNN_BINARY") or library.BINARY).with_name("libtarnn.so")
MISSING = f"there is no {BINARY.name} beside the compiled kernels"
HEADER = Path(__file__).parents[2] / "csrc"  # and runtime/tarnn.h in it
RUN = BINARY.with_name("tarnn-run")
OK, BAD_ARGUMENT, BAD_FILE, BAD_TOKEN, BAD_STATE, NO_MEMORY, NO_PROCESSOR, FAILED, NO_TOKENIZER = range(9)


class Refused(Exception):
    """code, sentence."""


class Sampling(ctypes.Structure):
    """How a token is drawn: `tarnn_sampling`."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
        ("top_k", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
    )


class Library:
    """The functions, whose failures are raised."""

    def __init__(self):
        self.c = ctypes.CDLL(str(BINARY))
        self.c.tarnn_error.restype = ctypes.c_char_p
        self.c.tarnn_bytes_of.restype = ctypes.c_void_p
        for name in ("vocab_size", "num_outputs", "num_positions", "position"):
            getattr(self.c, f"tarnn_{name}").restype = ctypes.c_int64

    def call(self, name, *arguments):
        if code := getattr(self.c, f"tarnn_{name}")(*arguments):
            raise Refused(code, self.c.tarnn_error().decode())

    def made(self, name, *arguments):
        """The pointer that a function puts into its last argument."""
        made = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(made))
        return made

    def open(self, path):
        return self.made("open", os.fsencode(path))

    def new(self, program, sequences):
        return self.made("new", program, ctypes.c_int64(sequences))

    def read(self, state, rows, num_outputs, threads=1):
        """Read some tokens of each sequence: logits (b, p), NaN of those that have none."""
        logits = torch.full((len(rows), num_outputs), torch.nan)
        self.call(
            "read", state, whole([x for row in rows for x in row]), whole(map(len, rows)), threads, pointer(logits)
        )
        return logits

    def step(self, state, tokens, num_outputs, threads=1):
        logits = torch.empty(len(tokens), num_outputs)
        self.call("step", state, whole(tokens), threads, pointer(logits))
        return logits

    def fork(self, state, which):
        return self.made("fork", state, whole(which), ctypes.c_int64(len(which)))

    def save(self, state):
        size = ctypes.c_size_t()
        self.call("save", state, None, ctypes.c_size_t(0), ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self.call("save", state, data, size, ctypes.byref(size))
        return data.raw

    def encode(self, tokenizer, text, *, starts=False):
        count = ctypes.c_size_t()
        self.call(
            "encode", tokenizer, text, ctypes.c_size_t(len(text)), starts, None, ctypes.c_size_t(0), ctypes.byref(count)
        )
        tokens = whole([0] * count.value)
        self.call("encode", tokenizer, text, ctypes.c_size_t(len(text)), starts, tokens, count, ctypes.byref(count))
        return list(tokens)

    def bytes_of(self, tokenizer, token):
        size = ctypes.c_size_t()
        at = self.c.tarnn_bytes_of(tokenizer, ctypes.c_int64(token), ctypes.byref(size))
        return ctypes.string_at(at, size.value) if size.value else b""

    def draw(self, program, sampling, position, logits):
        token = ctypes.c_int64()
        self.call(
            "draw", program, ctypes.byref(sampling), ctypes.c_int64(position), pointer(logits), ctypes.byref(token)
        )
        return token.value

    def load(self, program, data):
        return self.made("load", program, data, ctypes.c_size_t(len(data)))


def pointer(x):
    return ctypes.c_void_p(x.data_ptr())


def whole(numbers):
    numbers = list(numbers)
    return (ctypes.c_int64 * len(numbers))(*numbers)
