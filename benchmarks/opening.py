"""How long a model takes to open: a folder in bfloat16 packed to int8 as it opens, and the packed file of it.

    python benchmarks/opening.py --threads 1       # two minutes, and 5 GiB; benchmarks/results/opening.{json,md}

Hoped for: 1 GB of a folder's weights per second and thread, in no more than 1.3 times the packed bytes of memory of its own; a
packed file in 0.3 seconds. A model of the shape of Qwen3.5-0.8B, random weights, files in the page cache, no tokenizer. Seconds
of the processor are told apart: computed by the process, or spent by the system, which zeroes pages. Weights are written into
small pages; how long a thread takes that then moves them to large ones is measured, too.
"""

import resource
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as hf

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page, source
from tarnn.data.tokenizers import byte_tokenizer
from tarnn.decoding.opening import open_step
from tarnn.decoding.pack import pack_folder
from tarnn.families.by_name import open_program
from tarnn.program.packing import pack as packed_of
from tarnn.program.runtime import check_kernels

FULL = {"layers": 24, "hidden_size": 1024, "vocabulary": 248320}
QUICK = {"layers": 4, "hidden_size": 64, "vocabulary": 500}
LARGE_PAGES = "tarnn-large-pages"  # the thread that moves weights there
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16}
HEADS |= {"linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}


def main() -> int:
    return run(parse(__file__, __doc__, FULL, QUICK), measure, report=report)


def folder_of(options, folder: Path) -> Path:
    """Write a model with random weights in bfloat16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": options.hidden_size, "intermediate_size": 7 * options.hidden_size // 2}
    config = hf.Qwen3_5TextConfig(
        vocab_size=options.vocabulary, num_hidden_layers=options.layers, tie_word_embeddings=True, **sizes, **HEADS
    )
    hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def own_memory() -> int:
    """Return the bytes of memory that belong to this process alone, and to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(x.split()[1] for x in lines if x.startswith("RssAnon")))


def joined(name: str) -> float:
    """Wait for the thread of this name; return for how long."""
    start = time.perf_counter()
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join()
    return time.perf_counter() - start


def measure(options, results: dict[str, Any], keep) -> None:
    check_kernels()
    with TemporaryDirectory() as name, torch.no_grad():
        folder, file = folder_of(options, Path(name) / "model"), Path(name) / "model.tarnn"
        size = (folder / "model.safetensors").stat().st_size
        program, before = open_program(folder), own_memory()
        for x in program.weights():
            x.sum()  # read into the page cache
        spent, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        packed = packed_of(program, "int8")
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        results["folder"] = {
            "bytes": size,
            "seconds": seconds,
            "computed": after.ru_utime - spent.ru_utime,
            "system": after.ru_stime - spent.ru_stime,
            "packed_bytes": packed.block.nbytes,
            "own_memory": own_memory() - before,
            "moved": joined(LARGE_PAGES),
        }
        del packed
        keep()
        pack_folder(folder, file, "int8")
        start = time.perf_counter()
        opened = open_step(file)
        results["packed"] = {"seconds": time.perf_counter() - start, "bytes": file.stat().st_size}
        start = time.perf_counter()
        opened.step(torch.tensor([5]), opened.new_state(1, 1))
        results["packed"]["first_step"] = time.perf_counter() - start


def report(options, facts: dict[str, Any], results: dict[str, Any]) -> str:
    x, y = results["folder"], results["packed"]
    rows = [
        ["the folder's weights, packed to int8", f"{x['bytes'] / 1e9:.2f} GB in {x['seconds']:.2f} s"],
        ["of these computed, spent by the system", f"{x['computed']:.2f} s, {x['system']:.2f} s"],
        ["moved to large pages behind that", f"{x['moved']:.2f} s"],
        ["memory of its own, by the packed bytes", f"{x['own_memory'] / x['packed_bytes']:.2f}"],
        ["the packed file, opened", f"{y['seconds']:.3f} s"],
        ["its first token", f"{y['first_step']:.3f} s"],
    ]
    return page("Opening a model", source(facts, ""), markdown(["what", "measured"], rows))


if __name__ == "__main__":
    sys.exit(main())
