"""The README's measured times, written anew from benchmarks/.

python scripts/readme_figures.py        # after the benchmarks; a test compares
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README, BENCHMARKS = ROOT / "README.md", ROOT / "benchmarks"
TOKEN = (1, 16384)  # batch size, position
HEAD = "| measured | tarnn | PyTorch | llama.cpp |"


def with_figures(text: str) -> str:
    """Return the README with the times that were measured."""
    text = with_rows(text, HEAD, [*token_rows(), *layer_rows(), *attention_rows()])
    text = re.sub(
        r"takes [\d.]+ ms with a\nstate of [\d.]+ \wB; (.*?) takes [\d.,]+ ms with [\d.]+ \wB",
        "takes {} ms with a\nstate of {}; \\1 takes {} ms with {}".format(*token_figures()),
        text,
    )
    met, missed = re.search(r"Goals: (\d+) met, (\d+) missed", read("results/attention.md")).groups()  # type: ignore[union-attr]
    text = re.sub(r"with [\d.]+ of \d+ goals missed", f"with {missed} of {int(met) + int(missed)} goals missed", text)
    compiled = any("compiled" in cell["method"] for cell in results("attention"))
    among = "among them for attention" if compiled else "not among them: these pages don't measure it"
    return re.sub(r"`torch\.compile` is (not )?among them[^.]*\.", f"`torch.compile` is {among}.", text)


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


def token_rows() -> list[list[str]]:
    """Return the times of one token of whole models, of `one_call.md` and `decode_baselines.py`."""
    ways = results("one_call")["Qwen3.5"]["ways"]
    transformers, rows = ways["transformers"]["token_ms"], []
    for weights in ("float32", "int8", "int4"):
        row = re.search(rf"\| Qwen3\.5, 102 M \| {weights} \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \(", read("one_call.md"))
        ours, llama = row.groups()  # type: ignore[union-attr]
        theirs = ms(transformers) if weights == "float32" else "–"
        rows.append([f"one token of Qwen3.5, 102 million weights, {weights}", ours, theirs, llama])
    for weights, theirs in (("bfloat16", ms(ways["transformers, bfloat16"]["prompt_ms"])), ("int8", "–")):
        row = re.search(rf"\| Qwen3\.5, 102 M \| {weights} \| ([\d,]+) \([\d,]+\) \| ([\d,]+) \(", read("one_call.md"))
        ours, llama = row.groups()  # type: ignore[union-attr]
        rows.append([f"a prompt of 1,024 tokens of Qwen3.5, {weights}", ours, theirs, llama])
    engines = results("decode_baselines").values()
    times = {x["engine"].split(" 0.")[0]: x["ms"] for x in engines if x["weights"] == "bfloat16" and "ms" in x}
    for after in ("128", "8192"):
        title = f"one token of a softmax model, 8 layers of 512, bfloat16, after {int(after):,} tokens"
        rows.append([title, ms(times["tarnn, softmax"][after]), "–", ms(times["llama.cpp"][after])])
    return rows


LAYERS = (
    ("gated delta rule, 16 heads of 128 (Qwen3.5)", "delta", "gated delta, forward"),
    ("the same, forward and backward", "delta", "gated delta, forward and backward"),
    ("delta rule with a decay per channel, 32 heads of 128 (Kimi)", "delta", "Kimi, forward"),
    ("Mamba-2's scan, 64 heads of 64", "convolution", "scan, float32, forward"),
    ("Mamba's scan, 1,536 channels", "scan", "selective, float32, 2048 tokens, forward"),
    ("short convolution, 4,096 channels", "convolution", "convolution, float32, forward"),
)


def layer_rows() -> list[list[str]]:
    """Return the times of linear layers over 2,048 tokens, in float32 on two threads: ours, transformers'."""
    rows = []
    for title, page, name in LAYERS:
        cell = results(page)[name]
        timings = cell.get("timings", cell)
        rows.append([title, *(ms(timings[who]["ms"]) for who in ("tarnn", "transformers")), "–"])
    return rows


def attention_rows() -> list[list[str]]:
    """Return the times of causal attention, 8 heads of 64, float32, forward, of `attention.py`."""
    rows = []
    for tokens in (16, 4096, 65536):
        shape = (64, tokens, "float32", True, "heads-first", False, False)
        keys = ("d", "t", "dtype", "causal", "layout", "cold", "backward")
        by = {c["method"]: c["ms"] for c in results("attention") if tuple(c[key] for key in keys) == shape}
        plain = min(x for method, x in by.items() if method not in ("native", "sdpa"))
        softmax = f" (softmax {ms(by['sdpa'])})" if "sdpa" in by else ""
        rows.append([f"linear attention, 8 heads of 64, {tokens:,} tokens", ms(by["native"]), ms(plain) + softmax, "–"])
    return rows


def results(name: str) -> Any:
    return json.loads(read(f"results/{name}.json"))["results"]


def read(name: str) -> str:
    return (BENCHMARKS / name).read_text(encoding="utf-8")


def ms(x: float) -> str:
    """Milliseconds with as many decimals as they are worth."""
    return f"{x:,.{2 if x < 10 else 1 if x < 1000 else 0}f}"


def decimal_bytes(n: int) -> str:
    """Three digits and a unit of 1000: 16.8 MB."""
    unit, size = next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if n >= s)
    return f"{n / size:.3g} {unit}"


if __name__ == "__main__":
    README.write_text(with_figures(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(README)
