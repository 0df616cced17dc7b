"""Chat templates: how a model wants a conversation written, as its folder says.

A template is a program in Jinja. It runs in transformers' sandbox, on plain data.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tarnn.errors import UserError

FILE = "chat_template.jinja"


def read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template of a tokenizer's folder, or None. settings: what is in its tokenizer_config.json.

    Of several the one called "default". Raises UserError where it can't be read.
    """
    file = folder / FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the chat template {file} can't be read: {error}. Copy it from its origin.") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        by_name = {x.get("name"): x.get("template") for x in template if isinstance(x, dict)}
        template = by_name.get("default")
    if not isinstance(template, str | None):
        raise UserError(f"chat_template in {folder}/tokenizer_config.json must be a text; got {template!r:.60}.")
    return template


def render(
    template: str, messages: Sequence[Mapping[str, str]], special: Mapping[str, str], *, answer_follows: bool
) -> str:
    """The conversation as one text. special: tokens that the template may write, as bos_token.

    answer_follows: up to where the next answer begins. Raises whatever a template raises that doesn't take these messages.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation: list[Any] = [dict(message) for message in messages]
    names: dict[str, Any] = dict(special)
    rendered: Any = render_jinja_template(
        [conversation], chat_template=template, add_generation_prompt=answer_follows, **names
    )
    return str(rendered[0][0] if isinstance(rendered, tuple) else rendered[0])
