"""The README's tables of measured times are those of the results beside it: a table that fell behind is a wrong claim."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def rows_behind(first_row: str) -> list[list[str]]:
    """The cells of the README's table whose head begins so, without head and rule."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first_row)) + 2
    table = lines[start : next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def decimal_bytes(n: int) -> str:
    """Three digits and a unit of 1000: 16.8 MB."""
    unit, size = next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if n >= s)
    return f"{n / size:.3g} {unit}"


def test_one_token_costs_what_decode_measured():
    points = json.loads((RESULTS / "decode.json").read_text())["results"]
    found = {(name.split(",")[0], p["batch_size"], p["position"]): p for name, of in points.items() for p in of}
    for position, batch_size, *cells in rows_behind("| position | batch |"):
        at = int(batch_size), int(position.replace(",", ""))
        expected = []
        for kind in ("linear", "softmax"):
            p = found.get((kind, *at))
            expected += [f"{p['ms']:,.2f}", decimal_bytes(p["state_bytes"])] if p else ["no room", "–"]
        assert cells == expected, (position, batch_size)


def test_attention_costs_what_attention_measured():
    cells = json.loads((RESULTS / "attention.json").read_text())["results"]
    found = {
        (c["method"], c["t"], c["backward"]): c["ms"]
        for c in cells
        if (c["d"], c["dtype"], c["causal"], c["layout"], c["cold"]) == (64, "float32", True, "heads-first", False)
    }
    for t, *measured in rows_behind("| t | tarnn, forward |"):
        at = int(t.replace(",", ""))
        times = [found.get((m, at, b)) for b in (False, True) for m in ("native", "specialised", "sdpa")]
        assert measured == ["–" if ms is None else f"{ms:,.2f}" for ms in times], t


def test_generate_takes_what_was_measured():
    at = json.loads((RESULTS / "generate.json").read_text())["results"]["256 × 8"]
    ours, int8, llama = (at["timings"][x]["ms"] / 128 for x in ("generate", "generate, int8", "generate, Llama"))
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"{ours:.1f} ms with {at['parameters']['tarnn'] / 1e6:.1f} M parameters on two CPU cores, {int8:.1f} ms with int8"
        in text
    )
    assert f"Llama of the same shape takes {llama:.1f} ms" in text
