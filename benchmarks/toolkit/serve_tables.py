"""Tables of the page of `serve.py`."""

import statistics
from typing import Any

from scripts.common.tables import MIB, markdown
from toolkit.serve_baselines import BATCHING, LLAMA, TRANSFORMERS

Found = dict[str, dict[str, Any]]


def measured(found: Found, case: str, weights: str) -> dict[str, Any]:
    """What a case gave, or nothing."""
    result = found.get(f"{case}, {weights}", {})
    return {} if "missing" in result else result


def by_weights(options, found: Found, case: str) -> dict[str, dict[str, Any]]:
    return {x: result for x in options.weights if (result := measured(found, case, x))}


def number(x: float | None, digits: int = 0) -> str | None:
    return None if x is None else f"{x:,.{digits}f}"


def engine_table(options, found: Found) -> str:
    rows = []
    for weights, result in by_weights(options, found, "engine").items():
        bare = statistics.median(result["bare step"])
        for kind in ("bare step", "greedy", "sampled"):
            speed = statistics.median(result[kind])
            spread = f"{min(result[kind]):,.0f}–{max(result[kind]):,.0f}"
            rows.append([weights, kind, number(speed), f"{speed / bare:.2f}", spread])
    return markdown(["weights", f"{options.streams[-1]} rows", "tokens/s", "of the bare step", "range"], rows, left=2)


def speed_rows(options, found: Found) -> list[tuple[str, str, str, dict[str, Any]]]:
    """(server, weights, streams, what was measured)."""
    rows = []
    for name, case in (("tarnn", "speeds"), (LLAMA, LLAMA), (TRANSFORMERS, TRANSFORMERS), (BATCHING, BATCHING)):
        for weights, result in by_weights(options, found, case).items():
            rows += [(name, weights, n, x) for n, x in result.items() if isinstance(x, dict) and "speed" in x]
    return rows


def speed_table(options, found: Found) -> str:
    header = "server | weights | streams | tokens/s | p50 between, ms | p99, ms | first, ms | server | clients"
    rows = [
        [
            *name,
            number(x["speed"]),
            number(x["p50"], 2),
            number(x["p99"], 2),
            number(x["first"], 1),
            *(f"{x[cpu] / x['seconds']:.0%}" if "seconds" in x else None for cpu in ("server_cpu", "client_cpu")),
        ]
        for *name, x in speed_rows(options, found)
    ]
    return markdown(header, rows, left=3)


def talk_table(options, found: Found) -> str:
    rows = []
    for weights, result in by_weights(options, found, "talks").items():
        rows.append(["tarnn, whole prompts", weights, result["prompt"]])
        rows.append(["tarnn, from its state", weights, result["response"]])
    for name in (LLAMA, TRANSFORMERS, BATCHING):
        rows += [[name, weights, x["talk"]] for weights, x in by_weights(options, found, name).items()]
    lines = [
        [*names, number(x["seconds"], 2), number(statistics.median(x["first_ms"]), 1), number(x["first_ms"][-1], 1)]
        + [number(x[name]) for name in ("last_prompt", "read", "again")]
        for *names, x in rows
    ]
    header = "server | weights | seconds | first token, ms | of the last turn | last prompt | tokens read | read again"
    return markdown(header, lines, left=2)


def state_table(options, found: Found) -> str:
    rows = []
    for weights in options.weights:
        for kind, x in measured(found, "prefix", weights).items():
            if isinstance(x, dict):
                where = f"first token behind {options.prefix:,} tokens: {kind}"
                rows.append(
                    [where, weights, f"{x['median']:,.1f} ms", f"{x['most']:,.1f} ms", f"{x['cached']:,} cached"]
                )
        for place, x in measured(found, "resume", weights).items():
            if isinstance(x, dict):
                for kind, name in (("state", "the state is there"), ("first", "next token")):
                    what = f"parked conversation, from {place}: {name}"
                    rows.append([what, weights, f"{statistics.median(x[kind]):.2f} ms", f"{max(x[kind]):.2f} ms", ""])
        if x := measured(found, "parked", weights):
            whole = x["number"] * x["state"]
            of_states = (
                f"{x['resident'] / whole:.3f} × their states; {x['live'] / whole:.3f} without what the heap has free"
            )
            size = f"{x['resident'] / MIB:,.0f} MiB"
            rows.append([f"{x['number']:,} parked conversations", weights, size, None, of_states])
    return markdown(["", "weights", "median", "most", ""], rows, left=2)


def gaps(x: dict[str, Any]) -> list[str | None]:
    return [number(x["speed"]), *(number(x[name], 2) for name in ("p50", "p99", "quiet_p99"))]


def pressure_table(options, found: Found) -> str:
    rows = []
    for weights in options.weights:
        if x := measured(found, "prompts", weights):
            what = f"{x['prompts']} prompts of {options.long_prompt:,} tokens, one a second"
            said = f"such a prompt's first token: {x['prompt_first']:,.0f} ms" if x["prompt_first"] else ""
            rows.append([what, weights, *gaps(x), said])
        if x := measured(found, "overload", weights):
            what = f"{x['rate']:,.0f} requests a second ({options.overload} times the capacity)"
            said = f"{x['refused']:,} of {x['requests']:,} refused"
            if x["refused"]:
                said += (
                    f", in {x['refused_p50']:.1f} ms (p99 {x['refused_p99']:.1f}); memory {x['grown'] / MIB:+,.0f} MiB"
                )
            rows.append([what, weights, *gaps(x), said])
    header = f"{options.streams[-1]} streams | weights | tokens/s | p50 between, ms | p99, ms | p99 alone, ms | "
    return markdown(header, rows, left=2)
