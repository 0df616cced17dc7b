"""Write drawn programs as packed files: `python -m support.packed_programs FOLDER COUNT`, in tests/."""

import sys
from pathlib import Path

import torch

from support.drawn_programs import VOCABULARY, drawn_program
from tarnn.decoding.packed_file import write_packed
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.products import FORMATS
from tarnn.program.hybrid import hybrid
from tarnn.program.instructions import Program
from tarnn.program.outline import outline_of
from tarnn.program.packing import pack
from tarnn.program.recording import Recorder, heads, product, softmax


def of_long_texts() -> Program:
    """Record a program without a last position: softmax over all keys, and over a window of more than one block of them."""
    record, generator = Recorder(), torch.Generator().manual_seed(0)
    x = record.embed(torch.randn(VOCABULARY, 16, generator=generator))
    for window in (None, 600):
        q, k, v = (heads(product(x, torch.randn(16, 16, generator=generator) / 4), 4) for _ in range(3))
        if window is None:
            o = softmax(q, k, v, record.state("KVCache"), scale=0.5)
        else:
            o = hybrid(q, k, v, reach=["window", "exact", "window", "exact"], scale=0.5, window=window, sinks=3)
        x = x + product(o, torch.eye(16))
    return record.head(x, torch.randn(VOCABULARY, 16, generator=generator))


def main(folder: str, count: str) -> None:
    library.available()  # which registers what packs
    Path(folder).mkdir(exist_ok=True)
    programs = [of_long_texts(), *map(drawn_program, range(int(count)))]
    for i, program in enumerate(programs):
        packed = pack(program, FORMATS[i % len(FORMATS)])
        write_packed(Path(folder) / f"{i}.tarnn", packed, {"outline": outline_of(program)}, {})


if __name__ == "__main__":
    main(*sys.argv[1:])
