"""The same conversation with any server: so many turns, each with all that was said before, or from a parked state."""

from collections.abc import Callable
from typing import Any

from toolkit.loads import Answer, Wrong, apply_load, check_whole, written
from toolkit.servers import Server

WORDS = (
    "The lighthouse keeper wrote down what the sea had brought that night, and {n} things were new to him. He asked the "
    "harbour master what to do with them; the answer came by the next boat. Tell me what happened on day {n}, in order."
)


def said_by_user(turn: int) -> str:
    return WORDS.format(n=turn + 1)


def talk(server: Server, turns: int, tokens: int, cached: Callable[[Answer], int | None], **fields: Any) -> dict:
    """By /v1/chat/completions: seconds from the first question to the last token, and tokens of prompts read more than once.

    cached: of an answer, how many tokens of its prompt were not read; None where the server doesn't say.
    """
    messages: list[dict[str, str]] = []
    seconds, read, length, first = 0.0, 0, 0, []
    tells = True
    for turn in range(turns):
        messages.append({"role": "user", "content": said_by_user(turn)})
        body = {
            "model": server.model,
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        load = apply_load(server, {"": {"streams": 1, "bodies": [body]}}, "/v1/chat/completions")
        (answer,) = load.groups[""]
        check_whole([answer], 1, written(answer))
        if not answer["times"]:
            raise Wrong(f"turn {turn + 1} has no text")
        usage = answer["usage"] or {}
        seconds += answer["times"][-1] - answer["sent"]
        first.append(1000 * (answer["times"][0] - answer["sent"]))
        length = usage.get("prompt_tokens", 0)
        kept = cached(answer)
        tells = tells and kept is not None and bool(length)
        read += length - (kept or 0)
        messages.append({"role": "assistant", "content": answer["text"]})
    return {
        "turns": turns,
        "seconds": seconds,
        "last_prompt": length,
        "read": read if tells else None,
        "again": max(0, read - length) if tells else None,
        "first_ms": first,
    }


def talk_from_states(server: Server, turns: int, tokens: int) -> dict:
    """By /v1/responses, each of which goes on from the one before it."""
    previous, seconds, read, length, first = None, 0.0, 0, 0, []
    for turn in range(turns):
        body = {
            "model": server.model,
            "input": said_by_user(turn),
            "max_output_tokens": tokens,
            "temperature": 0,
            "stream": True,
            **({"previous_response_id": previous} if previous else {}),
        }
        (answer,) = apply_load(server, {"": {"streams": 1, "bodies": [body]}}, "/v1/responses").groups[""]
        check_whole([answer], 1, written(answer))
        if not answer["times"] or not answer["usage"]:
            raise Wrong(f"turn {turn + 1} has no text, or no usage")
        usage = answer["usage"]
        previous = usage["response_id"]
        seconds += answer["times"][-1] - answer["sent"]
        first.append(1000 * (answer["times"][0] - answer["sent"]))
        length = usage["input_tokens"]
        read += length - usage["input_tokens_details"]["cached_tokens"]
    return {
        "turns": turns,
        "seconds": seconds,
        "last_prompt": length,
        "read": read,
        "again": max(0, read - length),
        "first_ms": first,
    }


def cached_by_usage(answer: Answer) -> int | None:
    """As OpenAI's API tells it, or llama.cpp's own."""
    usage = answer["usage"] or {}
    details = usage.get("prompt_tokens_details") or {}
    return details.get("cached_tokens", (usage.get("timings") or {}).get("cache_n"))
