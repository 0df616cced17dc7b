"""What to run on a GPU that is lent for half an hour: one command, which stops itself and keeps each result as it comes.

    python benchmarks/gpu_session.py --out OUT                    # all steps, in this order, 28 minutes at most
    python benchmarks/gpu_session.py --out OUT --minutes 9 --steps machine smoke attention
    python benchmarks/gpu_session.py --out OUT --minutes 9 --steps laws ops

machine    versions, and which path attention takes: if it is PyTorch's, nothing else is worth the time
smoke      the laws of the commonest calls, and a step in a CUDA graph: do the kernels run at all, and are they right?
attention  ours on six shapes, forward and both, then the baselines one after another (gpu_attention.py)
decode     tokens per second by batch and position (gpu_decode.py)
laws       all laws of the kernels: 195 calls, three dtypes, heads up to 256
ops        the op's own tests on the device, those that don't compile hundreds of kinds of calls

A step that fails or takes longer than its share doesn't stop the others. OUT has a log of each step, the pages of results and
`session.json`, which says how each step ended; tests run side by side where pytest-xdist is installed. Nothing has to be
installed but torch, Triton and what `pyproject.toml` asks for: tarnn itself is taken from `src/`.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MACHINE = (
    "import torch, tarnn; from tarnn.kernels.triton import device; print(tarnn.__version__, torch.__version__, "
    "device.triton_version(), torch.cuda.get_device_name(), *device.status(0), sep='\\n')"
)
LAWS, OPS = "tests/triton/test_on_a_gpu.py", "tests/ops"
SMOKE = "(bfloat16 and 300 and (causal or random or weighted)) or cuda_graph"
STEPS: dict[str, tuple[float, list[str]]] = {  # minutes at most; the command, {out} being the folder of results
    "machine": (1.0, ["-c", MACHINE]),
    "smoke": (3.0, ["pytest", LAWS, "-k", SMOKE]),
    "attention": (6.0, ["benchmarks/gpu_attention.py", "--minutes", "5", "--out", "{out}"]),
    "decode": (5.0, ["benchmarks/gpu_decode.py", "--out", "{out}"]),
    "laws": (9.0, ["pytest", LAWS]),
    "ops": (6.0, ["pytest", f"{OPS}/test_citizen.py", f"{OPS}/test_packing.py", f"{OPS}/test_step.py", "-k", "cuda"]),
}


def command(step: str, out: Path) -> list[str]:
    """As this process's Python runs it. Warnings of other versions than ours are no failures."""
    _, words = STEPS[step]
    if words[0] == "pytest":
        side_by_side = ["-n", "8"] if importlib.util.find_spec("xdist") else []
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *side_by_side, *words[1:]]
    return [sys.executable, *(word.format(out=out) if word == "{out}" else word for word in words)]


def run(words: list[str], log: Path, seconds: float) -> str:
    """How it ended: "ok", "failed" or "stopped". What it printed is in the log, whichever it was."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        started = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return "failed" if started.wait(max(seconds, 0.0)) else "ok"
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)  # with the processes that it started
            started.wait()
            return "stopped"


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--minutes", type=float, default=28.0)
    made.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS))
    options = made.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begun, found = time.monotonic(), {}
    for step in options.steps:
        left = 60 * options.minutes - (time.monotonic() - begun)
        log, started = options.out.absolute() / f"{step}.log", time.monotonic()
        ended = (
            run(command(step, options.out.absolute()), log, min(60 * STEPS[step][0], left)) if left > 5 else "no time"
        )
        found[step] = {"ended": ended, "seconds": round(time.monotonic() - started, 1)}
        (options.out / "session.json").write_text(json.dumps(found, indent=1) + "\n")
        print(
            step,
            *found[step].values(),
            *(log.read_text().splitlines()[-3:] if log.exists() else []),
            sep="\n   ",
            flush=True,
        )
    return int(any(x["ended"] != "ok" for x in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
