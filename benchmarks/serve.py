"""A server of states: `tarnn serve` and its engine under load, beside llama.cpp's server and `transformers serve`.

    python benchmarks/serve.py --python ENVIRONMENT/bin/python      # fifteen minutes; benchmarks/results/serve.{json,md,png}

A linear model of 256 × 8 with a byte-level vocabulary, and for the others a Llama of the same shape, all with random weights.
Clients run on loopback in a process of their own (`toolkit/stream_load.py`), each server in another. ENVIRONMENT has the
program `llama-server`, the package `gguf`, and `transformers` with its extra `serving`: what it lacks is named,
and its rows are left out. Before anything is measured, a busy engine's answers must be those of the token loop. --resume goes on.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit import engine_cases, serve_baselines, serve_cases, serve_report
from toolkit.loads import Wrong
from toolkit.serve_baselines import BATCHING, LLAMA, TOGETHER, TRANSFORMERS, or_why_not
from toolkit.serve_report import figure
from toolkit.served_models import make_tokenizer, save_linear, save_llama

from scripts.common.options import as_facts, parse
from scripts.common.others import taken_quietly
from scripts.common.results import Unmeasured, run
from tarnn.serving.model import ServedModel, open_served

FULL = {
    "python": Path(sys.executable),
    "weights": ["float32", "int8"],
    "streams": [1, 8, 32],
    "tokens": 256,
    "waves": 4,
    "rounds": 5,
    "vocab": 4096,
    "hidden": 256,
    "layers": 8,
    "heads": 8,
    "long_prompt": 8192,
    "prompt_seconds": 10,
    "prefix": 100_000,
    "repeats": 15,
    "parked": 10_000,
    "overload": 4,
    "overload_seconds": 6.0,
    "turns": 20,
    "turn_tokens": 64,
    "cases": [str],
    "resume": False,
}
QUICK = {
    "weights": ["float32"],
    "streams": [1, 2],
    "tokens": 8,
    "waves": 1,
    "rounds": 1,
    "vocab": 512,
    "hidden": 32,
    "layers": 1,
    "heads": 2,
    "long_prompt": 64,
    "prompt_seconds": 1,
    "prefix": 300,
    "repeats": 2,
    "parked": 20,
    "overload_seconds": 0.3,
    "turns": 2,
    "turn_tokens": 4,
}
ABOUT = {
    "python": "the interpreter of the environment that has the other servers",
    "tokens": "of an answer; each client has --waves of them, one after the other",
    "cases": "only these, such as speeds or overload",
    "resume": "go on where the results file ends",
}
Found = dict[str, dict[str, Any]]  # by case and weights


class Models(NamedTuple):
    """Folders of the linear model and of the Llama, and the width of a feed-forward's middle."""

    linear: Path
    llama: Path
    inner: int


def engine(options, models: Models, weights: str) -> dict[str, Any]:
    """The bare step, and the engine with all rows greedy or with a seed each: tokens a second, in turns."""
    served, rows = opened(models, weights), options.streams[-1]
    tokens = options.tokens * options.waves
    calls = {
        "bare step": partial(engine_cases.bare_step_speed, served, rows, tokens),
        "greedy": partial(engine_cases.engine_speed, served, rows, tokens, False),
        "sampled": partial(engine_cases.engine_speed, served, rows, tokens, True),
    }
    return engine_cases.medians_in_turns(calls, options.rounds)


def resume(options, models: Models, weights: str) -> dict[str, Any]:
    served = opened(models, weights)
    with tempfile.TemporaryDirectory() as folder:
        places = {"memory": None, "disk": Path(folder)}
        return {x: engine_cases.resume_ms(served, place, 2 * options.repeats) for x, place in places.items()}


def parked(options, models: Models, weights: str) -> dict[str, Any]:
    """In a process of its own, whose memory is nobody else's."""
    worker = Path(engine_cases.__file__)
    command = [sys.executable, str(worker), str(models.linear), weights, str(options.parked)]
    path = os.pathsep.join([str(worker.parents[1]), str(worker.parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        raise Wrong((done.stderr.strip().splitlines() or ["it ended without a word"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def of_linear(measure: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda options, models, weights: measure(options, models.linear, weights)


CASES: dict[
    str, tuple[Callable[..., dict[str, Any]], str]
] = {  # what measures it, and in which weights: of --weights, or one
    "engine": (engine, "all"),
    "speeds": (of_linear(serve_cases.speeds), "all"),
    "prompts": (of_linear(serve_cases.beside_prompts), "all"),
    "prefix": (of_linear(serve_cases.long_prefix), "last"),
    "resume": (resume, "last"),
    "parked": (parked, "last"),
    "overload": (of_linear(serve_cases.overload), "last"),
    "talks": (of_linear(serve_baselines.own_talks), "all"),
    LLAMA: (lambda o, m, weights: serve_baselines.llama_cpp(o, m.llama, m.inner, weights), "all"),
    TRANSFORMERS: (lambda o, m, weights: serve_baselines.transformers_serve(o, m.llama), "first"),
    BATCHING: (lambda o, m, weights: serve_baselines.transformers_serve(o, m.llama, *TOGETHER), "first"),
}


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, about=ABOUT)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        models = make_models(options, Path(folder))
        return run(
            options,
            partial(measure, models),
            check=partial(check, models),
            facts=serve_report.facts,
            report=serve_report.report,
            figure=figure,
        )


def make_models(options, folder: Path) -> Models:
    tokenizer = make_tokenizer(options.vocab)
    model = save_linear(folder / "linear", options, tokenizer)
    save_llama(folder / "llama", options, model.config.intermediate_size, tokenizer)
    return Models(folder / "linear", folder / "llama", model.config.intermediate_size)


def opened(models: Models, weights: str) -> ServedModel:
    return open_served(models.linear, weights=weights)


def check(models: Models, options) -> str:
    if unknown := {*(options.cases or ())} - {*CASES}:
        return f"no case is called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}"
    return engine_cases.not_the_loops(opened(models, options.weights[-1]), min(options.tokens, 32))


def measure(models: Models, options, found: Found, keep: Callable[[], None]) -> None:
    take_up(options, found)
    for case, (call, which) in CASES.items():
        if options.cases and case not in options.cases:
            continue
        chosen = {"all": options.weights, "first": options.weights[:1], "last": options.weights[-1:]}[which]
        for weights in chosen:
            name = f"{case}, {weights}"
            if name in found and "missing" not in found[name]:
                print(f"{name}: measured before")
                continue
            result, share = taken_quietly(partial(or_why_not, partial(call, options, models, weights)))
            found[name] = {**result, "others": share, "load": os.getloadavg()[0]}
            print(f"{name}: {serve_report.told(found[name])}", flush=True)
            keep()
            gc.collect()


def take_up(options, found: Found) -> None:
    """With --resume, what an earlier run with these settings has left."""
    file = options.out / "serve.json"
    if options.resume and file.exists():
        settings = {"settings": json.loads(json.dumps(comparable(as_facts(options))))}
        before = json.loads(file.read_text())
        if comparable(before["settings"]) != settings["settings"]:
            raise Unmeasured("serve.json was measured with other settings: start anew, without --resume.")
        found.update(before["results"])


def comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """What a figure depends on."""
    return {name: x for name, x in settings.items() if name not in ("python", "cases")}


if __name__ == "__main__":
    sys.exit(main())
