"""The README's measured times, written anew from benchmarks/results.

python scripts/readme_figures.py        # after the benchmarks; a test compares
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
TOKEN = (1, 16384)  # batch size, position


def with_figures(text: str) -> str:
    """Return the README with the times that were measured."""
    text = with_rows(text, "| 2,048 tokens", layer_rows())
    text = re.sub(
        r"takes [\d.]+ ms with a\nstate of [\d.]+ \wB; (.*?) takes [\d.,]+ ms with [\d.]+ \wB",
        "takes {} ms with a\nstate of {}; \\1 takes {} ms with {}".format(*token_figures()),
        text,
    )
    ours, softmax = attention_figures()
    text = re.sub(r"8 heads of 64: [\d.]+ ms, and\n[\d.,]+ ms", f"8 heads of 64: {ours} ms, and\n{softmax} ms", text)
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
    """Put these rows in place of those below the table's head, which begins so, and its rule."""
    lines = text.splitlines(keepends=True)
    begin = next(i for i, line in enumerate(lines) if line.startswith(head)) + 2
    end = next(i for i in range(begin, len(lines)) if not lines[i].startswith("|"))
    return "".join([*lines[:begin], *(f"| {' | '.join(row)} |\n" for row in rows), *lines[end:]])


def token_figures() -> list[str]:
    """Return time and bytes of state of one token, linear and softmax, at one position, of `decode.py`."""
    points = results("decode")
    by = {name.split(",")[0]: p for name, of in points.items() for p in of if (p["batch_size"], p["position"]) == TOKEN}
    return [x for p in (by["linear"], by["softmax"]) for x in (f"{p['ms']:,.2f}", decimal_bytes(p["state_bytes"]))]


def attention_figures() -> list[str]:
    """Return the times of causal attention, d = 64, float32, forward, of `attention.py`: ours and softmax's."""
    shape = (64, 4096, "float32", True, "heads-first", False, False)
    keys = ("d", "t", "dtype", "causal", "layout", "cold", "backward")
    ms = {c["method"]: c["ms"] for c in results("attention") if tuple(c[key] for key in keys) == shape}
    return [f"{ms['native']:,.2f}", f"{ms['sdpa']:,.2f}"]


LAYERS = (
    ("gated delta rule, 16 heads of 128 (Qwen3.5)", "delta", "gated delta{}", "forward and backward"),
    ("delta rule with a decay per channel, 32 heads of 128 (Kimi)", "delta", "Kimi{}", "forward and backward"),
    ("Mamba-2's scan, 64 heads of 64, 8 groups", "convolution", "scan, float32{}", "forward + backward"),
    ("Mamba's scan, 1,536 channels", "scan", "selective, float32, 2048 tokens{}", "forward + backward"),
    ("short convolution, 4,096 channels", "convolution", "convolution, float32{}", "forward + backward"),
)


def layer_rows() -> list[list[str]]:
    """Return the times of linear layers in float32 on two threads: ours, transformers'."""
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
