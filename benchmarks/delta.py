"""The delta rule, beside the functions that transformers runs on a CPU and beside ONNX Runtime's fused operator.

    python benchmarks/delta.py --python ENVIRONMENT/bin/python       # ten minutes; benchmarks/results/delta.{json,md}

The claim: gated delta attention (Qwen3-Next, Qwen3.5) and Kimi's, with a decay per channel, cost a CPU a fraction of what they
cost elsewhere, forward, with gradients, and for one token. 2,048 tokens, batch 1, float32, laid out as projections lay them out;
all take turns on the same inputs. ONNX Runtime (`com.microsoft.LinearAttention`, forward alone) runs in a process of its own, in
ENVIRONMENT, which has `onnx` and `onnxruntime`; without them it is named and left out. It is compared on one thread, by the least
of all rounds; transformers' functions on two, by the median. Correctness is checked first, against the definition in float64, and
transformers and ONNX Runtime against ours.
"""

import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.clock import Contender, Effort, Timing, measure_in_turns, with_threads
from scripts.common.options import parse
from scripts.common.others import taken_quietly
from scripts.common.results import run
from scripts.common.tables import bullets, markdown, mebibytes, milliseconds, page, ratio, source
from scripts.common.targets import Target, at_least, at_most, section
from tarnn import DeltaState, delta_rule, delta_step
from tarnn.kernels.cpu import library
from tarnn.ops.delta import definition

logging.getLogger("transformers").setLevel(logging.ERROR)  # it says that it falls back
from transformers.models.kimi_linear import modeling_kimi_linear as kimi  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next as qwen  # noqa: E402

HEADS, KIMI_HEADS = 16, 32
FULL = {"python": Path(sys.executable), "length": 2048, "head_dims": [64, 128], "kimi_dim": 128, "rounds": 15}
QUICK = {"length": 130, "head_dims": [16], "kimi_dim": 16, "rounds": 2}
ABOUT = {"python": "the interpreter of the environment that has onnx and onnxruntime"}
OURS, THEIRS, FUSED, OPERATOR = "tarnn", "transformers", "ONNX Runtime", "tarnn, the operator alone"
FASTER_THAN_FUSED = {64: 1.7, 128: 2.4}
Found = dict[str, Any]


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, about=ABOUT)
    return run(options, measure, check=check, targets=targets, report=report)


# --- inputs: q, k, v (1, t, h, d), β (1, t, h), decays (1, t, h) or (1, t, h, d), S (1, h, d, d)


def inputs(length: int, heads: int, head_dim: int, channels: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(1, *shape, generator=generator)  # noqa: E731
    q, k = (torch.nn.functional.normalize(rand(length, heads, head_dim), dim=-1) for _ in range(2))
    decay = -0.1 * rand(length, heads, *[head_dim] * channels).abs()
    S = rand(heads, head_dim, head_dim)
    return {
        "q": q,
        "k": k,
        "v": rand(length, heads, head_dim),
        "beta": rand(length, heads).sigmoid(),
        "decay": decay,
        "S": S,
    }


def ours(x: dict[str, Tensor], **options: Any) -> Tensor:
    q, k, v, beta, decay = (x[name].transpose(1, 2) for name in ("q", "k", "v", "beta", "decay"))
    return delta_rule(q, k, v, beta, log_decay=decay, state=DeltaState(x["S"]), **options).transpose(1, 2)


def theirs(x: dict[str, Tensor]) -> Tensor:
    function = qwen.torch_chunk_gated_delta_rule if x["decay"].ndim == 3 else kimi.chunk_kimi_delta_attention
    tensors = (x["q"], x["k"], x["v"], x["decay"], x["beta"])
    return function(*tensors, initial_state=x["S"], output_final_state=True, use_qk_l2norm_in_kernel=True)[0]


def with_gradients(function: Callable[[dict[str, Tensor]], Tensor], x: dict[str, Tensor]) -> Callable[[], object]:
    leaves = {name: tensor.clone().requires_grad_(name != "S") for name, tensor in x.items()}
    grad_o = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(1))
    wanted = [tensor for tensor in leaves.values() if tensor.requires_grad]
    return lambda: torch.autograd.grad(function(leaves), wanted, grad_o)


def normalized(x: dict[str, Tensor]) -> Tensor:
    return ours(x, normalize_qk=True)


def check(options) -> str:
    """What is wrong with outputs or gradients of either kind of decay, or nothing."""
    for channels in (False, True):
        x = inputs(130, 2, 24, channels)
        exact = {name: tensor.double().transpose(1, 2) for name, tensor in x.items()}
        q, k, v, beta, decay = (exact[name] for name in ("q", "k", "v", "beta", "decay"))
        how = {"scale": 24**-0.5, "norm_eps": 1e-6, "state": x["S"].double()}
        expected = definition.recurrent(q, k, v, beta, log_decay=decay, **how)[0].transpose(1, 2)
        if (wrong := (normalized(x) - expected).abs().max().item()) > 1e-5:
            return f"o differs from the definition by {wrong:.1e}"
        pairs = [(normalized(x), theirs(x)), *zip(with_gradients(normalized, x)(), with_gradients(theirs, x)())]
        for a, b in pairs:
            if (wrong := ((a - b).abs().max() / b.abs().max()).item()) > 1e-4:
                return f"transformers' function gives other numbers, {wrong:.1e} apart"
    return ""


# --- ONNX Runtime, in its own process


class Missing(Exception):
    """Why ONNX Runtime is not measured."""


@contextmanager
def worker(python: Path, x: dict[str, Tensor], expected: Tensor) -> Iterator[SimpleNamespace]:
    """A process that answers how many seconds a call takes."""
    names = {"query": "q", "key": "k", "value": "v", "past_state": "S", "decay": "decay", "beta": "beta"}
    length, heads, head_dim = x["q"].shape[1:]
    shape = {"length": length, "heads": heads, "head_dim": head_dim}
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "inputs.npz", Path(folder) / "output.npy"
        arrays = {name: (x[ours] if ours == "S" else x[ours].flatten(2)).numpy() for name, ours in names.items()}
        np.savez(given, **arrays)
        script = Path(__file__).parent / "toolkit" / "delta_worker.py"
        command = [str(python), str(script), json.dumps(shape), str(given), str(made)]
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipe) as process:
            try:
                if not (line := process.stdout.readline()):
                    raise Missing((process.stderr.read().strip().splitlines() or ["it ended without a word"])[-1])
                difference = (torch.from_numpy(np.load(made)) - expected.flatten(2)).abs().max().item()
                if difference > 1e-5:
                    raise Missing(f"its numbers are {difference:.1e} apart from ours")

                def seconds(calls: int) -> float:
                    process.stdin.write(f"{calls}\n")
                    process.stdin.flush()
                    return float(process.stdout.readline())

                yield SimpleNamespace(version=json.loads(line)["version"], seconds=seconds)
            finally:
                process.stdin.close()
                process.wait()


def seconds_of(call: Callable[[], object], calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls


def beside_fused(
    options, x: dict[str, Tensor], call: Callable[[], object], others: dict[str, Callable[[], object]]
) -> Found:
    """Timings on one thread, in turns; ONNX Runtime's too, or why it is missing."""
    calls = 1 if x["q"].shape[1] > 1 else 20 if options.quick else 300
    results = {}
    with torch.no_grad(), with_threads(1):
        contenders = {OURS: lambda n: seconds_of(call, n)}
        contenders |= {name: lambda n, f=f: seconds_of(f, n) for name, f in others.items()}
        try:
            with worker(options.python, x, ours(x)) as fused:
                timings = in_turns({**contenders, FUSED: fused.seconds}, calls, options.rounds)
                results["version"] = fused.version
        except (Missing, OSError) as why:
            timings = in_turns(contenders, calls, options.rounds)
            results["missing"] = str(why)
    return {**results, "timings": timings}


def in_turns(contenders: dict[str, Callable[[int], float]], calls: int, rounds: int) -> dict[str, Timing]:
    def once() -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds + 1):  # the first is a warm-up
            for name, seconds in contenders.items():
                times[name].append(1000 * seconds(calls))
        return {name: sorted(x[1:]) for name, x in times.items()}

    found, share = taken_quietly(once)
    return {name: Timing(x[len(x) // 2], x[0], x[-1], rounds, calls, None, share) for name, x in found.items()}


# --- what is measured


def measure(options, found: Found, keep: Callable[[], None]) -> None:
    effort = Effort(0.0, seconds=20, rounds=(min(3, options.rounds), options.rounds))
    for d in options.head_dims:
        x = inputs(options.length, HEADS, d)
        found[f"forward, d = {d}"] = beside_fused(options, x, partial(ours, x), {})
        keep()
    for d in options.head_dims:
        found[f"one token, d = {d}"] = beside_fused(options, inputs(1, HEADS, d), *one_token(d))
        keep()
    for name, heads, d, channels in (
        ("gated delta", HEADS, options.head_dims[-1], False),
        ("Kimi", KIMI_HEADS, options.kimi_dim, True),
    ):
        x = inputs(options.length, heads, d, channels)
        with torch.no_grad():
            forward = {OURS: Contender(partial(normalized, x), 60), THEIRS: Contender(partial(theirs, x), 60)}
            found[f"{name}, forward"] = {"timings": measure_in_turns(forward, effort)}
        keep()
        both = {OURS: Contender(with_gradients(normalized, x), 60), THEIRS: Contender(with_gradients(theirs, x), 60)}
        found[f"{name}, forward and backward"] = {"timings": measure_in_turns(both, effort)}
        keep()


def one_token(d: int) -> tuple[Callable[[], object], dict[str, Callable[[], object]]]:
    """Our step in place; its operator alone, where there is one, and transformers' function."""
    x = inputs(1, HEADS, d)
    q, k, v, beta, decay = (x[name].transpose(1, 2) for name in ("q", "k", "v", "beta", "decay"))
    state = DeltaState(x["S"].clone())
    call = lambda: delta_step(q, k, v, beta, log_decay=decay, state=state, inplace=True)  # noqa: E731
    tensors = (x["q"], x["k"], x["v"], x["decay"], x["beta"])
    token = lambda: qwen.torch_recurrent_gated_delta_rule(*tensors, initial_state=x["S"], output_final_state=True)  # noqa: E731
    others: dict[str, Callable[[], object]] = {THEIRS: token}
    if library.available():
        operators, seen = torch.ops.tarnn_cpu, []
        operator = operators.delta_step
        operators.delta_step = SimpleNamespace(default=lambda *args: seen.append(args) or operator.default(*args))
        try:
            call()
        finally:
            operators.delta_step = operator
        others[OPERATOR] = lambda: operator.default(*seen[0])
    return call, others


# --- the page


def times_faster(
    found: Found, case: str, least: bool = False, name: str = OURS, than: str = THEIRS
) -> dict[str, float]:
    timings = found.get(case, {}).get("timings", {})
    if name not in timings or than not in timings:
        return {}
    a, b = timings[than], timings[name]
    return {case: a.ms_min / b.ms_min if least else a.ms / b.ms}


def targets(found: Found) -> list[Target]:
    if not library.available():
        return []
    goals = []
    for d, times in FASTER_THAN_FUSED.items():
        values = times_faster(found, f"forward, d = {d}", True, than=FUSED)
        goals.append(at_least(f"one thread, at least {times} × as fast as ONNX Runtime", f"d = {d}", times, values))
        who = OPERATOR if d == 64 else OURS
        values = {case: 1 / x for case, x in times_faster(found, f"one token, d = {d}", True, who, FUSED).items()}
        goals.append(at_most(f"one token, {who}: no longer than ONNX Runtime", f"d = {d}", 1.0, values))
    for case, times in (("gated delta, forward", 12), ("gated delta, forward and backward", 10)):
        goals.append(at_least(f"at least {times} × as fast as transformers", case, times, times_faster(found, case)))
    for case in ("Kimi, forward", "Kimi, forward and backward"):
        goals.append(at_least("at least 20 × as fast as transformers", case, 20, times_faster(found, case)))
        timings = found.get(case, {}).get("timings", {})
        peaks = [timings[name].peak_bytes for name in (OURS, THEIRS)] if timings else []
        share = {case: peaks[0] / peaks[1]} if all(peaks) and peaks else {}
        goals.append(at_most("at most a tenth of transformers' peak memory", case, 0.1, share))
    return goals


def report(options, facts: dict[str, Any], found: Found) -> str:
    alone, both = [], []
    for case, x in found.items():
        timings = x["timings"]
        if FUSED in timings or "missing" in x:
            alone += [
                [case, name, f"{t.ms_min:.3f}", f"{t.ms:.3f}", f"{t.ms_min / timings[OURS].ms_min:.2f}"]
                for name, t in timings.items()
            ]
            continue
        ours, theirs = timings[OURS], timings[THEIRS]
        peaks = [mebibytes(t.peak_bytes, 0) for t in (ours, theirs)]
        both.append([case, milliseconds(ours), milliseconds(theirs), ratio(theirs, ours), *peaks])
    missing = sorted({f"{FUSED}: {x['missing']}" for x in found.values() if "missing" in x})
    version = next((x["version"] for x in found.values() if "version" in x), "")
    how = (
        f"{options.length:,} tokens, batch 1, float32; {HEADS} heads, Kimi {KIMI_HEADS} heads of {options.kimi_dim} with a "
        f"decay per channel. ONNX Runtime {version or 'is missing'}. Peak memory: of one call, its results included."
    )
    return page(
        "The delta rule, beside transformers and ONNX Runtime",
        source(facts, how),
        section(targets(found)),
        "## One thread",
        markdown(["", "", "least, ms", "median, ms", "× tarnn"], alone, left=2),
        f"## {facts['threads']} threads, medians",
        markdown(["", "tarnn, ms", "transformers, ms", "×", "tarnn, MiB", "transformers, MiB"], both),
        "## Left out" if missing else "",
        bullets(missing) if missing else "",
    )


if __name__ == "__main__":
    sys.exit(main())
