"""How fast images are made: images a second (tables 1, 2, 4) and seconds for one (table 5) of "Transformers are RNNs".

    python experiments/image_speed.py           # the paper's MNIST and CIFAR-10 models; half an hour on two cores
    python experiments/image_speed.py --trained runs/image_bits/mnist-linear    # and what fewer bits cost that model
    python experiments/image_speed.py --quick

Ways to make the same kind of image from models of the same shape, with random weights (which cost what trained ones
do): softmax that computes its whole prefix again for every value, as the paper's baseline; softmax with a key/value
cache, allocated once; linear attention, an RNN, by its fused step (`tarnn.decoding.fused`), with weights kept as
float32 and as int8. A step is one value of each image of the batch, drawing it included. What a step costs is measured
at stated positions, and summed over the image along the parabola through them (reading a prefix again costs
a + b·p + c·p², a cache a + b·p, a state a): whole images of the first would take hours. Batch 1, and the batch with the
most images a second among those that fit into --room; each with the number of threads that is faster.

The paper's factors (317 and 4,462) compare with the recomputing one. Both factors are printed. With --trained, what fewer bits
change in the likelihood that a trained model gives to held-out images, value after value through the same step.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.decode_cost import rewind, state_at
from scripts.common.image_bits import bits_per_dim_by_steps
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.decoding.pixels import PixelLoop, pixel_sampler
from tarnn.kernels.cpu import library
from tarnn.models import TarnnForImageGeneration, TarnnImageConfig
from tarnn.models.images import START
from tarnn.tasks.checkpoint import open_model
from tarnn.tasks.images import read_images

MODELS: dict[str, dict[str, Any]] = {
    "mnist": {"image_height": 28, "image_width": 28, "num_channels": 1, "num_hidden_layers": 8},
    "cifar10": {"image_height": 32, "image_width": 32, "num_channels": 3, "num_hidden_layers": 16},
}
TINY = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 2}
METHODS = ("softmax, recomputed", "softmax, KV cache", "linear", "linear, int8 weights")
WEIGHTS = {"linear": "float32", "linear, int8 weights": "int8"}
# images a second, and seconds for one image on the paper's CPU and GPU
PAPER = {
    "mnist": {
        "softmax, recomputed": (0.45, 72.6, 10.2),
        "softmax, KV cache": (7.56, 7.4, 10.4),
        "linear": (142.8, 5.5, 7.3),
    },
    "cifar10": {
        "softmax, recomputed": (0.004, 8651.4, 300.1),
        "softmax, KV cache": (0.32, 71.9, 70.4),
        "linear": (17.85, 45.1, 61.3),
    },
}
MNIST = Path(__file__).parents[2] / "shared" / "data" / "mnist"
FULL = {
    "models": list(MODELS),
    "batches": [1, 4, 16, 64, 128, 256],
    "positions": 5,
    "seconds": 2.0,
    "room": 6.0,
    "methods": list(METHODS),
    "trained": Path,
    "mnist": MNIST,
    "test_images": 256,
}
QUICK = {"models": ["mnist"], "batches": [1, 4], "positions": 2, "seconds": 0.1}
ABOUT = {
    "positions": "how many, the first and the last value among them",
    "seconds": "of steps at each position",
    "room": "GiB that states and activations may take",
    "mnist": "whose test images it is judged on",
    "trained": "a trained model of MNIST, as image_bits.py leaves one",
}


StepAt = Callable[[int], Callable[[], object]]  # position → a step there


@dataclass(frozen=True)
class Speed:
    """Of making a whole batch: seconds an image of it takes all told, and where that was measured."""

    batch_size: int
    threads: int
    seconds: float  # for the whole batch, summed over its values
    positions: list[int]
    ms: list[float]  # a step at each position, median
    steps: list[int]  # timed there

    @property
    def images_a_second(self) -> float:
        return self.batch_size / self.seconds


def main() -> int:
    choices = {"models": list(MODELS), "methods": list(METHODS)}
    options = parse(__file__, __doc__, FULL, QUICK, choices=choices, about=ABOUT)
    likelihood = None if options.trained is None else likelihoods(options)
    return run(options, measure, facts=lambda options, results: {"likelihood": likelihood}, report=report)


def measure(options, results: dict[str, dict[str, dict[str, Speed]]], keep) -> None:
    for name in options.models:
        results[name] = {}
        for method in options.methods:
            if WEIGHTS.get(method, "float32") == "float32" or library.available():
                results[name][method] = speeds(name, method, options)
                keep()


def likelihoods(options) -> dict[str, Any]:
    """Bits per dimension of held-out images with weights in each format, and how far they are from float32's."""
    model = open_model(options.trained, tasks=("image",))
    images = read_images(str(options.mnist), parts=("test",)).take(slice(options.test_images))
    bits = {
        weights: bits_per_dim_by_steps(model, images, FusedStep(model, weights)).mean().item()
        for weights in ("float32", "bfloat16", "int8")
    }
    change = {weights: value / bits["float32"] - 1 for weights, value in bits.items()}
    config = model.config
    about = f"{config.num_hidden_layers} layers, {config.hidden_size} wide"
    return {"model": about, "images": len(images), "bits_per_dim": bits, "change": change}


def build(name: str, method: str, quick: bool) -> TarnnForImageGeneration:
    torch.manual_seed(0)
    attention = "linear" if method in WEIGHTS else "softmax"
    choices = MODELS[name] | (TINY if quick else {}) | {"attention": attention}
    return TarnnForImageGeneration(TarnnImageConfig.paper(**choices)).eval()


@torch.no_grad()
def speeds(name: str, method: str, options) -> dict[str, Speed]:
    """ "one": the fastest at batch 1; "best": the batch with the most images a second, larger ones while they gain 5 %."""
    model, found = build(name, method, options.quick), []
    for batch_size in options.batches:
        if batch_size > 1 and bytes_of(model, method, batch_size) > options.room * 2**30:
            print(f"{name}, {method}: batch {batch_size} doesn't fit", flush=True)
            break
        if method == "softmax, recomputed":
            step_at = prefixes(model, batch_size)
        else:
            step_at = states(model, batch_size, WEIGHTS.get(method))
        length = model.config.sequence_length
        both = [speed_of(step_at, batch_size, length, n, options) for n in sorted({1, options.threads})]
        found.append(min(both, key=lambda speed: speed.seconds))
        print(
            f"{name:8} {method:20} batch {batch_size:4}  {found[-1].seconds:10.2f} s for the batch, "
            f"{found[-1].images_a_second:8.3f} images/s, {found[-1].threads} threads",
            flush=True,
        )
        if len(found) > 1 and found[-1].images_a_second < 1.05 * max(x.images_a_second for x in found[:-1]):
            break
    torch.set_num_threads(options.threads)
    return {"one": found[0], "best": max(found, key=lambda speed: speed.images_a_second)}


def bytes_of(model: TarnnForImageGeneration, method: str, batch_size: int) -> int:
    """What a batch takes beside the weights: its state; of a recomputing model, the activations of the longest prefix."""
    config = model.config
    if method == "softmax, recomputed":
        return batch_size * config.sequence_length * (4 * config.hidden_size + config.intermediate_size) * 4
    with torch.device("meta"):
        layers = [
            block.attention.new_state(1, capacity=config.sequence_length, device="meta") for block in model.model.layers
        ]
    return batch_size * sum(layer.nbytes for layer in layers)


def speed_of(step_at: StepAt, batch_size: int, length: int, threads: int, options) -> Speed:
    """Steps timed at positions from the first value to the last; the sum over all of an image's values."""
    torch.set_num_threads(threads)
    spread = [i / max(1, options.positions - 1) for i in range(options.positions)]
    positions = sorted({round(x * (length - 1)) for x in spread})
    times = [timings(step_at(position), options.seconds) for position in positions]
    ms = [1000 * sorted(x)[len(x) // 2] for x in times]
    return Speed(batch_size, threads, summed(positions, ms, length) / 1000, positions, ms, [len(x) for x in times])


def states(model: TarnnForImageGeneration, batch_size: int, weights: str | None = None) -> StepAt:
    """Steps of the pixel loop with `position` values behind them: drawing, writing, reading, all in its buffers.

    weights: how a fused step keeps them, where one serves; None: the model's own step."""
    fused = weights is not None and (weights != "float32" or refusal(model) is None)
    step = FusedStep(model, weights) if fused else None
    loop, length = PixelLoop(model, batch_size, step=step), model.config.sequence_length
    sample = pixel_sampler(model.likelihood, generator=torch.Generator().manual_seed(0))
    loop.state = state_at(model, length - 1, batch_size, room=1)  # type: ignore[arg-type]
    parameters = torch.zeros(batch_size, model.likelihood.num_parameters)

    def step_at(position: int) -> Callable[[], object]:
        token = loop.tokens[:, position]

        def step() -> None:
            state = rewind(loop.state, position)
            token.copy_(sample(parameters))
            loop.step(token, state, inplace=True)

        return step

    return step_at


def prefixes(model: TarnnForImageGeneration, batch_size: int) -> StepAt:
    """Steps that read everything before them again; only the last place goes through the head."""
    sample = pixel_sampler(model.likelihood, generator=torch.Generator().manual_seed(0))

    def step_at(position: int) -> Callable[[], object]:
        ids = torch.zeros(batch_size, position + 1, dtype=torch.long)
        ids[:, 0] = START
        places = torch.arange(position + 1)[None]

        def step() -> None:
            x = model.model(inputs_embeds=model.embed(ids, places, None), use_cache=False).last_hidden_state
            sample(model.head(x[:, -1]).float())

        return step

    return step_at


def timings(step: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of single steps after a warm-up, for about so long and at least three of them (one, if they are slow)."""
    start = time.perf_counter()
    step()
    least = 1 if time.perf_counter() - start > 5 * seconds else 3
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < until and len(times) < 300):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def summed(positions: list[int], ms: list[float], length: int) -> float:
    """Σ over all positions of the parabola (or line) that fits the measured ones best; relative errors count alike."""
    degree = min(2, len(positions) - 1)
    powers = torch.arange(degree + 1)
    at, y = torch.tensor(positions).double() / length, torch.tensor(ms).double()
    curve = torch.linalg.lstsq((at[:, None] ** powers) / y[:, None], torch.ones(len(ms), 1).double()).solution
    return ((torch.arange(length).double()[:, None] / length) ** powers @ curve).sum().item()


def report(options, facts, results) -> str:
    parts = [
        f"Up to {options.threads} threads, float32 but for the weights named int8. Steps timed at {options.positions} "
        "positions of an image and summed over it (positions and times: image_speed.json). The paper's CPU and GPU were "
        "others; its batches were not equal."
    ]
    for name, methods in results.items():
        base = methods.get("softmax, recomputed")
        rows = [
            [
                m,
                f"{found['one'].seconds:.2f}",
                f"{paper(name, m)[1]:g} / {paper(name, m)[2]:g}",
                f"{found['best'].images_a_second:.4g} (batch {found['best'].batch_size})",
                f"{paper(name, m)[0]:g}",
                base and f"{found['best'].images_a_second / base['best'].images_a_second:,.1f}",
                f"{paper(name, m)[0] / paper(name, 'softmax, recomputed')[0]:,.0f}",
            ]
            for m, found in methods.items()
        ]
        header = [
            "method",
            "s for one image",
            "paper, CPU / GPU",
            "images/s, best batch",
            "paper, GPU",
            "times recomputing",
            "paper",
        ]
        parts += [f"## {name}", markdown(header, rows)]
    if likelihood := facts["likelihood"]:
        bits, change = likelihood["bits_per_dim"], likelihood["change"]
        parts += [
            "## What fewer bits cost",
            f"Bits per dimension of {likelihood['images']} test images of MNIST by a trained model "
            f"({likelihood['model']}), value after value through the fused step.",
            markdown(["weights", "bits/dim", "change"], [[w, f"{bits[w]:.4f}", f"{change[w]:+.3%}"] for w in bits]),
        ]
    return page("How fast images are made", *parts)


def paper(name: str, method: str) -> tuple[float, float, float]:
    return PAPER[name]["linear" if method in WEIGHTS else method]


if __name__ == "__main__":
    sys.exit(main())
