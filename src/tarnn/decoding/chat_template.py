"""The chat template in a tokenizer's folder: read as text, run in a sandbox, with one sentence for a fault."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from tarnn.decoding.chat_allowance import ALLOWANCE, LEFT, PER_CHARACTER, TOO_MUCH, weight
from tarnn.decoding.chat_sandbox import Environment
from tarnn.errors import UserError

FILE, MORE = "chat_template.jinja", "additional_chat_templates"
DEFAULT, WITH_TOOLS = "default", "tool_use"
LONGEST = 2**20  # characters of a template
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's thoughts; the first is the usual one


def read_chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of a tokenizer's folder by name; "default" is the usual one.

    settings: what is in its tokenizer_config.json. Raises UserError where one can't be read, or is none.
    """
    given = settings.get("chat_template")
    if isinstance(given, list):
        given = {x.get("name"): x.get("template") for x in given if isinstance(x, dict)}
    templates = {} if given is None else dict(given) if isinstance(given, dict) else {DEFAULT: given}
    for file in (folder / FILE, *sorted((folder / MORE).glob("*.jinja"))):
        if file.is_file():
            try:
                templates[DEFAULT if file.name == FILE else file.stem] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"the chat template {file} can't be read: {error}. Copy it from its origin.") from error
    for template in templates.values():
        if not isinstance(template, str):
            raise UserError(f"chat_template in {folder}/tokenizer_config.json must be a text; got {template!r:.60}.")
        if len(template) > LONGEST:
            raise UserError(
                f"a chat template in {folder} has {len(template):,} characters; expected at most {LONGEST:,}."
            )
    return templates


def render(template: str, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
    """Write a conversation as one text. names: what else the template may use, such as tools and bos_token.

    Everything is JSON's kind of data. Raises whatever a template raises that doesn't take these messages: jinja2's
    TemplateError where it takes too many steps or writes too much.
    """
    conversation = [with_reasoning(plain(message)) for message in messages]
    context = plain(names) | {"messages": conversation}
    compiled = _compiled(template)
    LEFT.set([2**62])
    characters = weight(context)
    LEFT.set([ALLOWANCE + PER_CHARACTER * characters])
    try:
        return compiled.render(context)
    except RecursionError:
        raise TemplateError(TOO_MUCH) from None


@lru_cache(maxsize=64)
def _compiled(template: str) -> Any:
    return _environment().compile_metered(template)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment()


def plain(value: Any) -> Any:
    """Copy JSON's kind of data. Raises TypeError for anything else, whose methods a template might call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    raise TypeError(f"a conversation is made of texts, numbers, lists and dicts; got {type(value).__name__}")


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without keys that are null, and with its thoughts under the names that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    thoughts = next((message[name] for name in REASONING if name in message), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}
