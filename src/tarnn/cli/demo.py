"""`tarnn demo`: from nothing to text in five minutes, and the figures that say what for."""

import json
import lzma
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch.utils._pytree import tree_map_only
from typer import Option

from tarnn.cli.output import Output
from tarnn.decoding import fastest_step
from tarnn.decoding.loop import Step, TokenLoop
from tarnn.decoding.samplers import sampler
from tarnn.decoding.streaming import TextStream, decoder
from tarnn.decoding.threads import threads_for_steps
from tarnn.errors import UserError
from tarnn.huggingface.causal_lm import TarnnForCausalLM
from tarnn.huggingface.config import softmax_twin
from tarnn.tasks import TextSettings
from tarnn.tasks.checkpoint import open_model
from tarnn.tasks.text.corpus import Corpus, load
from tarnn.tasks.text.windowed import DATA
from tarnn.training.folder import LOG, SETTINGS, read_settings
from tarnn.training.run import TrainResult, train

NAME = "tarnn demo"  # of its runs, in their settings: by it the next demo knows a folder that it may clear
POSITIONS, QUICK_POSITIONS = (1024, 4096, 16384, 65536), (64, 256)
ROUNDS, STEPS = 7, 20  # of a measurement; steps of each round
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

    It measures bits per byte on held-out text, compared with `xz -9 --extreme`; and, at positions up to 65,536, the time
    per token and the bytes of state, compared with the same model with softmax attention and a cache of keys and values.
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
    costs = measure(model, QUICK_POSITIONS if quick else POSITIONS)
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
    loop.step = fastest_step(model).step
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
    """Print and return bits per byte: the model's, and those of LZMA, of the text alone and after the training text."""
    training, held_out = (ids[ids < 256].astype("uint8").tobytes() for ids in (corpus.train, corpus.validation))
    print(f"  {len(held_out):,} bytes held out, {len(training):,} for training\n")
    print(f"  {'':24}{'alone':>10}{'after the training text':>28}")
    print(f"  {'this model':24}{'':10}{result.validation:28.3f}", flush=True)
    alone = 8 * compressed_size(held_out) / len(held_out)
    after = 8 * (compressed_size(training + held_out) - compressed_size(training)) / len(held_out)
    print(f"  {'xz -9e':24}{alone:10.3f}{after:28.3f}", flush=True)
    print("\n  After the training text: the size of both together less that of the training text alone. The")
    print("  model's own size is not counted, and it reads the text in windows, each from an empty state.")
    return {"this model": result.validation, "xz -9e": {"alone": alone, "after_training": after}}


def compressed_size(data: bytes) -> int:
    """As `xz -9 --extreme` compresses: LZMA2 with a window of 64 MiB."""
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def measure(model: TarnnForCausalLM, positions: tuple[int, ...]) -> dict[str, list[dict[str, Any]]]:
    """Print and return the cost of a token at each position, in this model and in its twin with softmax."""
    twin = TarnnForCausalLM(softmax_twin(model.config)).eval()
    steps = {"linear": (model, fastest_step(model)), "softmax": (twin, fastest_step(twin))}
    costs: dict[str, list[dict[str, Any]]] = {name: [] for name in steps}
    print(f"  {'position':>10}{'linear, ms':>12}{'bytes of state':>16}{'softmax, ms':>13}{'bytes of cache':>16}")
    for position in positions:
        for name, (measured, chosen) in steps.items():
            costs[name].append(cost_of_token(measured, chosen.step, position))
        linear, softmax = costs["linear"][-1], costs["softmax"][-1]
        print(
            f"  {position:10,}{linear['ms']:12.3f}{linear['state_bytes']:16,}{softmax['ms']:13.3f}"
            f"{softmax['state_bytes']:16,}",
            flush=True,
        )
    print(f"""
  The {steps["linear"][1].name}, median of {ROUNDS} rounds, batch 1, one thread or all, whichever is faster. The tokens
  before a position were not generated: a state full of ones stands for them.""")
    return costs


@torch.no_grad()
def cost_of_token(model: TarnnForCausalLM, step: Step, position: int) -> dict[str, Any]:
    """Measure a step after `position` tokens: milliseconds, and the bytes of the state that hold something."""
    state, token = model.new_state(1, position + STEPS), torch.zeros(1, dtype=torch.long, device=model.device)
    state = tree_map_only(int, lambda length: position, state)  # a cache's length is its only number
    tensors = [x.fill_(1.0) for layer in state.layers for x in layer.tensors().values()]
    medians, threads = [], torch.get_num_threads()
    for number in sorted({1, threads}):
        torch.set_num_threads(number)
        times = []
        for _ in range(ROUNDS):
            state.position.fill_(position)
            after, start = state, time.perf_counter()
            for _ in range(STEPS):
                logits, after = step(token, after, inplace=True)
            logits[0, 0].item()  # a GPU is done only then
            times.append(1000 * (time.perf_counter() - start) / STEPS)
        medians.append(statistics.median(times))
    torch.set_num_threads(threads)
    return {"position": position, "ms": min(medians), "state_bytes": sum(x.nbytes for x in tensors)}


def write_results(
    out: Path, result: TrainResult, bits: dict[str, Any], costs: dict[str, list[dict[str, Any]]]
) -> dict[str, Path]:
    """Write the figures as JSON; return all files worth a look, by what they are."""
    files = {"checkpoint": out, "figures": out / "demo.json", "log": out / LOG}
    figures = {
        "steps": result.steps,
        "training_seconds": result.seconds,
        "bits_per_byte": bits,
        "decode": costs,
        "threads": torch.get_num_threads(),
    }
    files["figures"].write_text(json.dumps(figures, indent=2) + "\n")
    return files
