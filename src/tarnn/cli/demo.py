"""`tarnn demo`: from nothing to text in five minutes, and the figures that say what for."""

import json
import lzma
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import zstandard
from typer import Option

from tarnn.cli.output import Output
from tarnn.decoding import fastest_step
from tarnn.decoding.decode_cost import ROUNDS, SECONDS_A_ROUND, DecodeCost, fastest_decode_cost, softmax_twin
from tarnn.decoding.decode_cost_figure import plot_decode_cost
from tarnn.decoding.loop import TokenLoop
from tarnn.decoding.samplers import sampler
from tarnn.decoding.streaming import TextStream, decoder
from tarnn.decoding.threads import threads_for_steps
from tarnn.errors import UserError
from tarnn.models import TarnnForCausalLM
from tarnn.tasks import TextSettings
from tarnn.tasks.checkpoint import open_model
from tarnn.tasks.text.corpus import Corpus, load
from tarnn.tasks.text.windowed import DATA
from tarnn.training.folder import LOG, SETTINGS, read_settings
from tarnn.training.run import TrainResult, train

NAME = "tarnn demo"  # of its runs, in their settings: by it the next demo knows a folder that it may clear
POSITIONS, QUICK_POSITIONS = (1024, 4096, 16384, 65536), (64, 256)
MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "layers": 4,
    "heads": 4,
    "context": 256,
    "batch_size": 4,
    "learning_rate": 3e-3,
}
QUICK_MODEL: dict[str, Any] = {
    "hidden_size": 32,
    "layers": 2,
    "heads": 2,
    "context": 64,
    "batch_size": 8,
    "steps": 10,
    "learning_rate": 3e-3,
}
COMPRESSORS: dict[str, Callable[[bytes], int]] = {  # bytes → their size when compressed
    "xz -9e": lambda data: len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)),  # a window of 64 MiB
    "zstd -19": lambda data: len(zstandard.ZstdCompressor(level=19).compress(data)),  # of 8 MiB
}
PROMPT, SAMPLE_TOKENS, QUICK_SAMPLE_TOKENS = "The ", 600, 40


def demo(
    out: Annotated[Path, Option(help="The folder for all results; an earlier demo there is replaced.")],
    corpus: Annotated[
        Literal["python-docs", "python-stdlib"], Option(help="Python's documentation, or its sources.")
    ] = "python-docs",
    minutes: Annotated[float, Option(help="Minutes for the training; the rest takes about one more minute.")] = 3.0,
    seed: Annotated[int, Option(help="Decides the first weights and the order of the text.")] = 0,
    quick: Annotated[bool, Option("--quick", help="A tiny run of some seconds, to see that everything works.")] = False,
) -> None:
    """Train a small Linear Transformer, byte by byte, on text that comes with Python; let it write; measure it.

    What is measured: bits per byte on held-out text, beside general compressors; and, at positions up to
    65,536, the time per token and the bytes of state, beside the same model with softmax attention and a cache
    of keys and values.
    """
    replace = may_replace(out)
    settings = TextSettings(
        sources=(corpus,),
        out=out,
        seed=seed,
        overwrite=replace,
        sample_tokens=0,
        training_arguments={"run_name": NAME},
        **(QUICK_MODEL if quick else MODEL | {"max_minutes": minutes}),
    )
    heading(f"1. training on {corpus}" + ("" if quick else f" for {minutes:g} minutes"))
    result = train(settings)
    model, text = open_model(out, whole=True), load(out / DATA)
    heading(f"2. what it writes, after {PROMPT!r}")
    write_sample(model, text, QUICK_SAMPLE_TOKENS if quick else SAMPLE_TOKENS, seed)
    heading("3. bits per byte of the held-out text, less is better")
    bits = compare_bits(result, text)
    heading("4. time and memory per token, by position")
    costs = measure(model, QUICK_POSITIONS, 0.01) if quick else measure(model, POSITIONS)
    files = write_results(out, result, bits, costs)
    heading("5. where it is")
    for name, path in files.items():
        print(f"  {name:12}{path}")
    print(f"\n  more: tarnn generate {out} --prompt 'The '     tarnn info {out}")


def may_replace(out: Path) -> bool:
    """Whether `out` holds an earlier demo. UserError where it holds another run, which must stay."""
    if not (out / SETTINGS).exists():
        return False
    if read_settings(out)["settings"].get("training_arguments", {}).get("run_name") != NAME:
        raise UserError(f"{out} holds a run of `tarnn train`, not a demo; name another folder with --out.")
    return True


def heading(text: str) -> None:
    print(f"\n{text}\n", flush=True)


def write_sample(model: TarnnForCausalLM, corpus: Corpus, num_tokens: int, seed: int) -> None:
    """Text from the model, as it is made."""
    prompt, out, start = list(PROMPT.encode()), Output(), time.perf_counter()
    loop = TokenLoop(model, model.new_state(1))
    loop.step = fastest_step(model, loop.state).step
    loop.read(torch.tensor([prompt], device=model.device))
    stream = TextStream(decoder(corpus.tokenizer), prompt)
    out.write(PROMPT)
    draw = sampler(temperature=0.8, generator=torch.Generator(model.device).manual_seed(seed))
    with threads_for_steps(model):
        for token in loop.tokens(draw, num_tokens):
            stream.push(int(token))
            out.write(stream.take())
    stream.finish("enough")
    out.write(stream.take() + "\n")
    seconds = time.perf_counter() - start
    print(f"\n  {num_tokens:,} bytes in {seconds:.1f} s, temperature 0.8, {loop.state.nbytes:,} bytes of state")


def compare_bits(result: TrainResult, corpus: Corpus) -> dict[str, Any]:
    """Print and return bits per byte: the model's, and those of compressors, alone and after the training text."""
    training, held_out = (ids[ids < 256].astype("uint8").tobytes() for ids in (corpus.train, corpus.validation))
    print(f"  {len(held_out):,} bytes held out, {len(training):,} for training\n")
    print(f"  {'':24}{'alone':>10}{'after the training text':>28}")
    print(f"  {'this model':24}{'':10}{result.validation:28.3f}", flush=True)
    bits: dict[str, Any] = {"this model": result.validation}
    for name, compress in COMPRESSORS.items():
        alone = 8 * compress(held_out) / len(held_out)
        after = 8 * (compress(training + held_out) - compress(training)) / len(held_out)
        bits[name] = {"alone": alone, "after_training": after}
        print(f"  {name:24}{alone:10.3f}{after:28.3f}", flush=True)
    print("\n  After the training text: the size of both together less that of the training text alone. The")
    print("  model's own size is not counted, and it reads the text in windows, each from an empty state.")
    return bits


def measure(
    model: TarnnForCausalLM, positions: tuple[int, ...], seconds_a_round: float = SECONDS_A_ROUND
) -> dict[str, list[DecodeCost]]:
    """Prints and returns the time and memory per token at each position, in this model and in its twin with softmax:
    of the fused step, where the compiled kernels are there, as in `tarnn generate`."""
    twin = TarnnForCausalLM(softmax_twin(model.config)).eval()
    steps = {name: (x, fastest_step(x)) for name, x in (("linear", model), ("softmax", twin))}
    costs: dict[str, list[DecodeCost]] = {"linear": [], "softmax": []}
    print(f"  {'position':>10}{'linear, ms':>26}{'bytes of state':>16}{'softmax, ms':>26}{'bytes of cache':>16}")
    for position in positions:
        cells = []
        for name, (measured, chosen) in steps.items():
            cost = fastest_decode_cost(measured, position, seconds_a_round=seconds_a_round, step=chosen.step)
            costs[name].append(cost)
            cells.append(
                f"{cost.ms:11.3f} ({cost.ms_min:.3f} – {cost.ms_max:.3f})".rjust(26) + f"{cost.state_bytes:16,}"
            )
        print(f"  {position:10,}" + "".join(cells), flush=True)
    threads = " or ".join(dict.fromkeys(["1", str(torch.get_num_threads())]))
    print(f"""
  The {steps["linear"][1].name}, median of {ROUNDS} rounds (fastest – slowest), batch 1, {threads} threads, whichever
  is faster. The tokens before a position were not generated: random numbers stand for them.""")
    return costs


def write_results(
    out: Path, result: TrainResult, bits: dict[str, Any], costs: dict[str, list[DecodeCost]]
) -> dict[str, Path]:
    """The figures as JSON and as a plot; returns all files worth a look, by what they are."""
    files = {"checkpoint": out, "plot": out / "decode.png", "figures": out / "demo.json", "log": out / LOG}
    plot_decode_cost(costs, files["plot"], "one more token, batch 1: linear attention and softmax with a cache")
    figures = {
        "steps": result.steps,
        "training_seconds": result.seconds,
        "bits_per_byte": bits,
        "decode": {name: [asdict(cost) for cost in points] for name, points in costs.items()},
        "threads": torch.get_num_threads(),
    }
    files["figures"].write_text(json.dumps(figures, indent=2) + "\n")
    return files
