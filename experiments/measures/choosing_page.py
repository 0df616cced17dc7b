"""The page and the picture of `choosing.py`, and what its figures say."""

import statistics
from typing import Any, NamedTuple

from scripts.common.plots import BLUE, GREEN, ORANGE, PINK, RED, SKY, label, line, panels
from scripts.common.tables import markdown, page, source


class Kind(NamedTuple):
    keys: dict[str, Any]  # of the config
    style: str


DEFAULT = "linear, a decay per token"
KINDS = {
    "linear, elu, rotary positions": Kind({"decay": "none", "position": "rotary"}, SKY),
    DEFAULT: Kind({}, BLUE),
    "gated delta": Kind({"attention": "gated_delta"}, GREEN),
    "Mamba-2": Kind({"attention": "mamba2"}, ORANGE),
    "hybrid, one softmax layer in four": Kind({"attention": ["linear", "linear", "linear", "softmax"]}, PINK),
    "softmax, rotary positions": Kind({"attention": "softmax", "position": "rotary"}, RED),
}


def last_scores(runs: dict[str, Any]) -> dict[str, float]:
    """What the runs of one rate ended with, by seed."""
    return {seed: x["curve"][-1]["score"] for seed, x in runs.items()}


def best_rate(kind: dict[str, Any], more_is_better: bool) -> float:
    """The learning rate with which the first seed came furthest."""
    scores = {rate: next(iter(last_scores(runs).values())) for rate, runs in kind["runs"].items()}
    return float((max if more_is_better else min)(scores, key=scores.__getitem__))


def at_its_best(kind: dict[str, Any], more_is_better: bool) -> dict[str, Any]:
    """The runs at that rate, by seed."""
    return kind["runs"][f"{best_rate(kind, more_is_better):g}"]


def on_books(results: dict[str, Any]) -> dict[str, Any]:
    return {name: kinds for name, kinds in results.items() if name.startswith("books")}


def leaders(results: dict[str, Any]) -> list[str]:
    """The kinds that are ahead of the default in every seed, at every width."""

    def leads(kind: str) -> bool:
        for kinds in on_books(results).values():
            if kind not in kinds or DEFAULT not in kinds:
                return False
            here, there = (last_scores(at_its_best(kinds[name], False)) for name in (kind, DEFAULT))
            if here.keys() != there.keys() or any(here[seed] >= there[seed] for seed in here):
                return False
        return bool(on_books(results))

    return [kind for kind in KINDS if kind != DEFAULT and leads(kind)]


def report(options, facts, results: dict[str, Any]) -> str:
    parts = [source(facts, "")]
    if written := on_books(results):
        parts += [
            "## Bits per byte at equal processor time",
            f"Of the first {options.validation_bytes:,} bytes of {options.unseen}, after {options.minutes:g} minutes of "
            f"processor time on other novels, in steps of {options.batch_size} × {options.context} bytes; {options.layers} "
            f"layers of {options.heads} heads. The mean over {len(options.seeds)} seeds, and the least and the most; the "
            f"learning rate is the one of {', '.join(f'{x:g}' for x in options.rates)} with which the first seed came furthest.",
            *(markdown(*table(name, kinds, options)) for name, kinds in written.items()),
            verdict(results, options),
        ]
    if recalled := {name: results[name] for name in ("recall", "copying") if results.get(name)}:
        parts += [
            "## Recall",
            f"Per cent right after {options.recall_minutes:g} minutes of processor time each; {options.layers} layers, "
            f"{options.recall_width} wide. Recall: the value of each key, among so many pairs. Copying: sequences of "
            f"{options.copy_length} tokens, symbols out of 10.",
            markdown(*recall_table(recalled, options)),
        ]
    return page("Which attention for a small model", "![bits per byte, and recall](choosing.png)", *parts)


def table(name: str, kinds: dict[str, Any], options) -> tuple[list[str], list[list[Any]]]:
    rows = []
    for kind in KINDS:
        if kind in kinds:
            runs = at_its_best(kinds[kind], False)
            read = statistics.mean(x["steps"] for x in runs.values()) * options.batch_size * options.context / 1e6
            rate, numbers = best_rate(kinds[kind], False), kinds[kind]["parameters"]
            rows.append([kind, spread(last_scores(runs), 3), f"{rate:g}", f"{read:.1f}", f"{numbers / 1e6:.2f}"])
    return [name, "bits per byte", "learning rate", "millions of bytes read", "millions of parameters"], rows


def recall_table(tasks: dict[str, Any], options) -> tuple[list[str], list[list[Any]]]:
    columns = {f"{n} pairs": ("recall", str(n)) for n in options.pairs} if "recall" in tasks else {}
    columns |= {f"copying {options.copy_length}": ("copying", "score")} if "copying" in tasks else {}
    rows = []
    for kind in KINDS:
        cells = []
        for name, measure in columns.values():
            runs = at_its_best(tasks[name][kind], True) if kind in tasks[name] else {}
            values = {seed: x["curve"][-1][measure] for seed, x in runs.items()}
            cells.append(spread(values, 0) if values else None)
        rows.append([kind, *cells])
    return ["attention", *columns], [row for row in rows if any(row[1:])]


def spread(values: dict[str, float], digits: int) -> str:
    """The mean; of several seeds also the least and the most."""
    found = list(values.values())
    text = f"{statistics.mean(found):.{digits}f}"
    return text if len(found) < 2 else f"{text} ({min(found):.{digits}f} to {max(found):.{digits}f})"


def verdict(results: dict[str, Any], options) -> str:
    ahead, where = leaders(results), f"in all {len(options.seeds)} seeds and at all widths"
    return f"Ahead of the default ({DEFAULT}) {where}: {'; '.join(ahead) or 'none'}."


def figure(options, facts, results: dict[str, Any]):
    """Bits per byte against processor time for each width, and recall against the number of pairs; means over the seeds."""
    written = on_books(results)
    made, axes = panels(len(written) + ("recall" in results) or 1, width=5.0, height=4.6)
    for place, (name, kinds) in zip(axes, written.items()):
        for kind, found in kinds.items():
            looks = zip(*(x["curve"] for x in at_its_best(found, False).values()))
            points = [(mean(x, "seconds") / 60, mean(x, "score")) for x in looks]
            line(place, points, KINDS[kind].style, kind)
        label(
            place, "minutes of processor time", "bits per byte of an unseen novel", title=name, scales="linear linear"
        )
    for kind, found in results.get("recall", {}).items():
        ends = [x["curve"][-1] for x in at_its_best(found, True).values()]
        line(axes[-1], [(n, mean(ends, str(n))) for n in options.pairs], KINDS[kind].style, kind)
    if "recall" in results:
        label(axes[-1], "pairs", "values right, %", title="recall", ticks=options.pairs, scales="log linear")
    return made


def mean(entries: Any, name: str) -> float:
    return statistics.mean(x[name] for x in entries)
