"""The tokenizer of a folder that anybody may have written, as data, with one sentence for a fault.

The classes of tokenizers that transformers itself has are the only ones that are made. Names in the files that lead to
code in the folder (`auto_map`) are not followed, and no question is asked: for such a class, tokenizer.json says
enough. What runs as a model's program reads tokenizer.json alone (`tarnn.decoding.tokenizer`).
"""

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
