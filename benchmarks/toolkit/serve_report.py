"""The page of `serve.py`: goals, tables, what is missing, and a picture."""

import statistics
from typing import Any

from scripts.common.others import MOST
from scripts.common.plots import BLUE, GREY, ORANGE, RED, SKY, label, line, panels
from scripts.common.tables import bullets, page, source
from scripts.common.targets import Target, at_least, at_most, section
from toolkit.serve_baselines import BATCHING, LLAMA, TRANSFORMERS
from toolkit.serve_tables import (
    Found,
    by_weights,
    engine_table,
    measured,
    pressure_table,
    speed_rows,
    speed_table,
    state_table,
    talk_table,
)

COLORS = {"tarnn float32": f"{SKY} -", "tarnn int8": f"{BLUE} -"}
THEIRS = {
    f"{LLAMA} float32": f"{ORANGE} -",
    f"{LLAMA} int8": f"{RED} -",
    f"{TRANSFORMERS} float32": f"{GREY} -",
    f"{BATCHING} float32": f"{GREY} --",
}


def targets(options, found: Found) -> list[Target]:
    engine, speeds = by_weights(options, found, "engine"), by_weights(options, found, "speeds")
    most, last = str(options.streams[-1]), options.weights[-1]
    middle = statistics.median
    beside = lambda kind: {x: middle(e[kind]) / middle(e["bare step"]) for x, e in engine.items()}  # noqa: E731
    over_http = {x: s[most]["speed"] / middle(engine[x]["bare step"]) for x, s in speeds.items() if x in engine}
    prefix, resumed = measured(found, "prefix", last), measured(found, "resume", last)
    parked = measured(found, "parked", last)
    overload = measured(found, "overload", last)
    first = {x: prefix[x]["median"] for x in prefix if x.startswith(("state", "sent"))}
    parked_ratio = {"": parked["resident"] / (parked["number"] * parked["state"])} if parked else {}
    refused, accepted = f"at {options.overload} times the capacity", overload.get("p99") or 0.0
    of_accepted = {"": accepted / overload["quiet_p99"]} if accepted and overload["quiet_p99"] else {}
    in_memory, on_disk = ({"median": middle(resumed[x]["first"])} if resumed else {} for x in ("memory", "disk"))
    speed = known(speeds.get("float32", {}).get(most, {}).get("speed"))
    gaps = known(speeds.get(last, {}).get(most, {}).get("p99"))
    beside_prompts = f"while prompts of {options.long_prompt:,} tokens arrive at one a second"
    busy = known(measured(found, "prompts", last).get("p99"))
    return [
        at_least(f"the engine against the bare step, {most} rows", "greedy", 0.9, beside("greedy")),
        at_least(f"the engine against the bare step, {most} rows", "a seed each", 0.8, beside("sampled")),
        at_least("over HTTP against the bare step", "float32", 0.75, known(over_http.get("float32"))),
        at_least("tokens a second over HTTP", "float32", 12_000, speed, ""),
        at_most(f"p99 between tokens, {most} streams", last, 10, gaps, " ms"),
        at_most(f"p99 between tokens {beside_prompts}", last, 25, busy, " ms"),
        at_most(f"first token behind {options.prefix:,} cached ones", last, 20, first, " ms"),
        at_most("a parked conversation's next token", "from memory", 2, in_memory, " ms"),
        at_most("a parked conversation's next token", "from disk", 10, on_disk, " ms"),
        at_most(f"{options.parked:,} parked conversations against their states' bytes", last, 1.1, parked_ratio),
        at_most(f"p99 until the answer 429 {refused}", last, 5, known(overload.get("refused_p99")), " ms"),
        at_most(f"p99 between tokens of those accepted {refused}, against without", last, 1.5, of_accepted),
    ]


def known(value: float | None, where: str = "") -> dict[str, float]:
    """As the value of a goal, where it was measured."""
    return {} if value is None else {where: value}


def facts(options, found: Found) -> dict[str, Any]:
    return {"targets": [x.as_json() for x in targets(options, found)]}


def told(result: dict[str, Any]) -> str:
    """A result in a line, while it is measured."""
    if "missing" in result:
        return f"not measured: {result['missing']}"
    share = result.get("others")
    noise = "" if share is None else f" (others took {share:.0%} of the processors, load {result['load']:.1f})"
    return ", ".join(f"{name} {short(x)}" for name, x in result.items() if name not in ("others", "load")) + noise


def short(x: Any) -> str:
    if isinstance(x, dict):
        x = {n: x[n] for n in ("speed", "p99", "median", "seconds", "again", "first") if n in x}
        return "(" + ", ".join(f"{n} {short(y)}" for n, y in x.items()) + ")"
    if isinstance(x, list):
        return short(statistics.median(x)) if x else "none"
    return "–" if x is None else f"{x:,.4g}" if isinstance(x, float) else str(x)


def report(options, facts: dict[str, Any], found: Found) -> str:
    missing = [f"{name}: {x['missing']}" for name, x in found.items() if "missing" in x]
    noisy = [f"{name}: {x['others']:.0%}" for name, x in found.items() if (x.get("others") or 0) > MOST]
    shape = (
        f"{options.layers} layers, {options.hidden} wide, {options.vocab:,} tokens in the vocabulary; random weights"
    )
    return page(
        "Serving states",
        source(facts, f"{shape}. Clients and server share the processors."),
        section(targets(options, found)),
        "## The engine beside the bare step",
        engine_table(options, found),
        f"## Over HTTP: answers of {options.tokens} tokens, one event each",
        speed_table(options, found),
        "Processor time is that of the server, and of the clients, as a share of one core. llama.cpp has as many slots as there "
        f"are streams; answers of `transformers serve` have {max(8, options.tokens // 8)} tokens.",
        f"## The same conversation of {options.turns} turns",
        talk_table(options, found),
        "States as prompts: `/v1/responses` with `previous_response_id`. Read again: tokens of prompts that were read before. "
        "Answers are random, so the text of an answer need not become the tokens that it was written as.",
        "## States",
        state_table(options, found),
        "## Under pressure",
        pressure_table(options, found),
        "## Not measured" if missing else "",
        bullets(missing) if missing else "",
        "## Measured while others took more than 5 % of the processors" if noisy else "",
        bullets(noisy) if noisy else "",
    )


def figure(options, facts: dict[str, Any], found: Found) -> Any:
    """Tokens a second and p99 between tokens, by streams."""
    drawing, (speed, gap) = panels(2, f"{options.layers} layers, {options.hidden} wide, {options.threads} threads")
    rows = speed_rows(options, found)
    for name, style in (COLORS | THEIRS).items():
        points = [(int(n), x) for server, weights, n, x in rows if f"{server} {weights}" == name and n.isdigit()]
        line(speed, [(n, x["speed"]) for n, x in points], style, name)
        line(gap, [(n, x["p99"]) for n, x in points], style, name)
    label(speed, "streams", "tokens a second, all streams", ticks=options.streams)
    label(gap, "streams", "p99 between tokens, ms", ticks=options.streams)
    return drawing
