"""What a request says about the conversation that it belongs to."""

import json
import re
from typing import Any

IN_PATH = re.compile(r"/v1/(?:states|responses)/([^/]+)")
IDS = ("previous_response_id", "state", "user", "name")  # the first that is there; "name": of a state that is made
CHARACTERS, TOKENS = 64, 16  # of a prompt: its continuations begin alike


def conversation(path: str, body: bytes) -> bytes | None:
    """What all requests of one conversation have in common; None where any process may answer.

    The id or name of a state; the user; the messages up to the first of a user; or the beginning of a prompt. A
    body that is wrong belongs to nobody: whoever has it says what is wrong.
    """
    if match := IN_PATH.match(path):
        return match[1].encode()
    if not body:
        return None
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(asked, dict):
        return None
    for field in IDS:
        if isinstance(value := asked.get(field), str) and value:
            return value.encode(errors="replace")
    beginning = first_words(asked)
    return None if beginning is None else json.dumps(beginning, sort_keys=True).encode()


def first_words(asked: dict[str, Any]) -> Any:
    """How the text begins: the system's words and the first of the user's, or the prompt's first ones."""
    if (messages := asked.get("messages")) is not None:
        return until_user(messages)
    if (words := asked.get("input")) is not None:
        return [asked.get("instructions"), until_user(words)]
    prompt = next((asked[field] for field in ("prompt", "text") if asked.get(field) is not None), None)
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return prompt[:TOKENS]
    return prompt[:CHARACTERS] if isinstance(prompt, str) else None


def until_user(messages: Any) -> Any:
    if not isinstance(messages, list):
        return messages
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    return messages[: roles.index("user") + 1] if "user" in roles else messages[:1]
