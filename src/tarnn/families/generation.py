"""generation_config.json: the tokens that end a text, and how its author samples by default."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.json_file import read_json

FILE = "generation_config.json"


@dataclass(frozen=True)
class Generation:
    """Defaults of generation. None: the folder says nothing. end_ids: tokens that end a text; pad_id: fills up batches."""

    end_ids: frozenset[int] = frozenset()
    pad_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation(folder: str | Path, config: Config, vocab_size: int) -> Generation:
    """Read the defaults of a folder, whose ends are those of config.json where generation_config.json names none.

    Other keys of generation_config.json are not looked at. Raises UserError for values that are not possible.
    """
    file = Path(folder) / FILE
    given = Config(read_json(file, unique=True) if file.is_file() else {}, file)
    ends = given if given.get("eos_token_id") is not None else config
    pads = given if given.get("pad_token_id") is not None else config
    return Generation(
        end_ids=token_ids(ends, "eos_token_id", vocab_size),
        pad_id=min(token_ids(pads, "pad_token_id", vocab_size, padding=True), default=None),
        do_sample=given.flag("do_sample") if given.get("do_sample") is not None else None,
        temperature=given.number("temperature", None, least=0, most=1e6),
        top_k=given.size("top_k", None, least=0),
        top_p=given.number("top_p", None, least=0, most=1),
        min_p=given.number("min_p", None, least=0, most=1),
        repetition_penalty=given.number("repetition_penalty", None, least=1e-6, most=1e6),
    )


def token_ids(config: Config, key: str, vocab_size: int, *, padding: bool = False) -> frozenset[int]:
    """Return the token or the list of tokens under a key. padding: −1 and ids beyond the vocabulary stand for none."""
    value: Any = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(x) is int and (padding or 0 <= x < vocab_size) for x in ids):
        raise UserError(
            f"{config.place}: {key} must be a token below {vocab_size:,}, or a list of them; got {value!r:.60}. Take the file "
            "from the checkpoint's origin."
        )
    return frozenset(x for x in ids if 0 <= x < vocab_size)
