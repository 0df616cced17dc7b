"""The tokenizer of a folder that anybody may have written, and its chat template: as data, with one sentence for a fault.

The classes of tokenizers that transformers itself has are the only ones that are made. Names in the files that lead to
code in the folder (`auto_map`) are not followed, and no question is asked: for such a class, tokenizer.json says
enough. A chat template is a program in Jinja, which runs in transformers' sandbox, on plain data.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tarnn.errors import UserError
from tarnn.extras import needed_for
from tarnn.json_file import read_json

JSON_FILES = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")


@needed_for("a tokenizer")
def open_saved_tokenizer(folder: Path, config: Any = None) -> Any:
    """The tokenizer in `folder`, of the class that its files name. config: of the model beside it, already checked.

    Raises UserError where there is none or its files can't be read.
    """
    from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    found = {name: read_json(folder / name) for name in JSON_FILES if (folder / name).is_file()}
    if not found and not any(folder.glob("*.model")) and not any(folder.glob("vocab*")):
        raise UserError(f"{folder} holds no tokenizer (tokenizer.json). Copy it from the checkpoint's origin.")
    settings = found.get("tokenizer_config.json", {})
    try:
        own = "auto_map" in settings and tokenizer_class_from_name(str(settings.get("tokenizer_class"))) is None
        if own and "tokenizer.json" in found:
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        return AutoTokenizer.from_pretrained(
            folder, config=config or PreTrainedConfig(), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and the tokenizers library raise whatever they like
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"the tokenizer in {folder} can't be read: {reason}. Copy it from the checkpoint's origin."
        ) from error


def check_ids(ids: Any, vocab_size: int) -> None:
    """UserError where a tokenizer makes ids (array or tensor, of any shape) that the model has no embedding for."""
    if 0 not in ids.shape and (largest := int(ids.max())) >= vocab_size:
        raise UserError(
            f"the tokenizer makes ids up to {largest} but the model knows {vocab_size}: they don't belong together. "
            "Put the model's own tokenizer into the checkpoint."
        )


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
