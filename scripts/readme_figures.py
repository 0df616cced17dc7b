"""The README's measured times, written anew from benchmarks/results.

python scripts/readme_figures.py        # after the benchmarks; a test compares
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
BATCHES = ((1, (1024, 4096, 16384, 65536)), (32, (1024, 4096, 16384, 65536)))
LENGTHS = (128, 256, 1024, 4096, 16384, 65536)


def with_figures(text: str) -> str:
    """The README with the times that were measured."""
    text = with_rows(text, "| position | batch |", token_rows())
    text = with_rows(text, "| t | tarnn, forward |", attention_rows())
    text = with_rows(text, "| 2,048 tokens", layer_rows())
    met = [target["met"] for target in page("attention")["targets"]]
    verdict = f"{met.count(True)} met, {met.count(False)} missed"
    text = re.sub(r"(goals for speed and memory): [\d.]+ met, \d+ missed", rf"\1: {verdict}", text)
    at = results("generate")["256 × 8"]
    ours, int8, llama = (at["timings"][x]["ms"] / 128 for x in ("generate", "generate, int8", "generate, Llama"))
    parameters = at["parameters"]["tarnn"] / 1e6
    text = re.sub(
        r"[\d.]+ ms with [\d.]+ M parameters on two CPU cores, [\d.]+ ms with int8",
        f"{ours:.1f} ms with {parameters:.1f} M parameters on two CPU cores, {int8:.1f} ms with int8",
        text,
    )
    return re.sub(r"(Llama of the same shape takes) [\d.]+ ms", rf"\1 {llama:.1f} ms", text)


def with_rows(text: str, head: str, rows: list[list[str]]) -> str:
    """With these rows in place of those below the table's head, which begins so, and its rule."""
    lines = text.splitlines(keepends=True)
    begin = next(i for i, line in enumerate(lines) if line.startswith(head)) + 2
    end = next(i for i in range(begin, len(lines)) if not lines[i].startswith("|"))
    return "".join([*lines[:begin], *(f"| {' | '.join(row)} |\n" for row in rows), *lines[end:]])


def token_rows() -> list[list[str]]:
    """One token: time and bytes of state, linear and softmax, of `decode.py`."""
    points = results("decode")
    by = {(name.split(",")[0], p["batch_size"], p["position"]): p for name, of in points.items() for p in of}
    rows = []
    for batch_size, position in ((b, t) for b, positions in BATCHES for t in positions):
        row = [f"{position:,}", str(batch_size)]
        for kind in ("linear", "softmax"):
            p = by.get((kind, batch_size, position))
            row += [f"{p['ms']:,.2f}", decimal_bytes(p["state_bytes"])] if p else ["no room", "–"]
        rows.append(row)
    return rows


PYTORCH = ("chunked", "specialised")


def attention_rows() -> list[list[str]]:
    """Attention, causal, d = 64, float32, of `attention.py`; of the ways in PyTorch the faster one, row by row."""
    ms = {
        (c["method"], c["t"], c["backward"]): c["ms"]
        for c in results("attention")
        if (c["d"], c["dtype"], c["causal"], c["layout"], c["cold"]) == (64, "float32", True, "heads-first", False)
    }
    ways = [(methods, backward) for backward in (False, True) for methods in (("native",), PYTORCH, ("sdpa",))]
    rows = []
    for t in LENGTHS:
        times = [[x for method in methods if (x := ms.get((method, t, backward)))] for methods, backward in ways]
        rows.append([f"{t:,}", *(f"{min(found):,.2f}" if found else "–" for found in times)])
    return rows


LAYERS = (
    ("gated delta rule, 16 heads of 128 (Qwen3.5)", "delta", "gated delta{}", "forward and backward"),
    ("delta rule with a decay per channel, 32 heads of 128 (Kimi)", "delta", "Kimi{}", "forward and backward"),
    ("Mamba-2's scan, 64 heads of 64, 8 groups", "convolution", "scan, float32{}", "forward + backward"),
    ("Mamba's scan, 1,536 channels", "scan", "selective, float32, 2048 tokens{}", "forward + backward"),
    ("short convolution, 4,096 channels", "convolution", "convolution, float32{}", "forward + backward"),
)


def layer_rows() -> list[list[str]]:
    """Linear layers in float32 on two threads, of `delta.py`, `convolution.py` and `scan.py`: ours, transformers'."""
    rows = []
    for title, page, name, both in LAYERS:
        row = [title]
        for way in ("forward", both):
            found = results(page)[name.format(f", {way}")]
            timings = found.get("timings", found)
            row += [f"{timings[who]['ms']:,.1f}" for who in ("tarnn", "transformers")]
        rows.append(row)
    return rows


def results(name: str) -> Any:
    return page(name)["results"]


def page(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def decimal_bytes(n: int) -> str:
    """Three digits and a unit of 1000: 16.8 MB."""
    unit, size = next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if n >= s)
    return f"{n / size:.3g} {unit}"


if __name__ == "__main__":
    README.write_text(with_figures(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(README)
