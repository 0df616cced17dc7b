"""A checked view of config.json: values by key, each of its type, and at the end no key that nobody looked at.

A family reads it from top to bottom:

    hidden = config.size("hidden_size")
    eps = config.number("rms_norm_eps", 1e-6, least=0)
    config.choice("hidden_act", "silu")  # refuses any other
    bias = config.flag("attention_bias", False)
    config.check_all_taken()

A key that is null counts as absent: its default holds. `key in config` tells one from the other.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

from tarnn.checkpoint_keys import METHOD
from tarnn.errors import UserError
from tarnn.families.harmless import HARMLESS, HARMLESS_VALUES, OF_COMPOSITES
from tarnn.json_file import read_json

FILE = "config.json"
LARGEST, MOST = 2**24, 2**16  # of a size; of layers, heads, experts, groups
COUNTED = ("*layers", "*heads", "*experts*", "*groups")
LARGEST_FLOAT = 3.4e38  # of float32
REQUIRED: Any = object()
T = TypeVar("T")


class Config:
    """Values of a config by key. It keeps a record of the keys that were taken. place: begins its error messages."""

    def __init__(self, fields: Mapping[str, Any], place: str | Path = "the config", outer: "Config | None" = None):
        self.place = str(place)
        self._values = fields
        self._taken: set[str] = set()
        self._inner: dict[str, Config] = {}
        self._outer = outer
        refuse_quantized(fields, self.place)

    @classmethod
    def read(cls, folder: str | Path) -> "Config":
        """Read config.json of a folder. Raises UserError where it is missing or can't be read."""
        file = Path(folder) / FILE
        if not file.is_file():
            raise UserError(f"{folder} holds no model: there is no {FILE} in it. Give the folder of a checkpoint.")
        return cls(read_json(file, unique=True), file)

    @property
    def model_type(self) -> str:
        """The name by which transformers knows the model's family."""
        return self.word("model_type")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value as it stands in the file, unchecked; the default where it is absent or null."""
        self._taken.add(key)
        value = self._values.get(key)
        if value is None and default is REQUIRED:
            raise UserError(f"{self.place} lacks {key}. Take {FILE} from the checkpoint's origin.")
        return default if value is None else value

    @overload
    def size(self, key: str, default: int = REQUIRED, *, least: int = 1, most: int | None = None) -> int: ...
    @overload
    def size(self, key: str, default: None, *, least: int = 1, most: int | None = None) -> int | None: ...
    def size(self, key: str, default: int | None = REQUIRED, *, least: int = 1, most: int | None = None) -> int | None:
        """Return a whole number of at least `least`. most: None for a bound that no known model exceeds."""
        value = self.get(key, default)
        return None if value is None else self._whole(key, value, least, most)

    @overload
    def number(
        self, key: str, default: float = REQUIRED, *, least: float = -LARGEST_FLOAT, most: float = LARGEST_FLOAT
    ) -> float: ...
    @overload
    def number(
        self, key: str, default: None, *, least: float = -LARGEST_FLOAT, most: float = LARGEST_FLOAT
    ) -> float | None: ...
    def number(
        self, key: str, default: float | None = REQUIRED, *, least: float = -LARGEST_FLOAT, most: float = LARGEST_FLOAT
    ) -> float | None:
        """Return a finite number of `least` to `most`."""
        value = self.get(key, default)
        return None if value is None else self._real(key, value, least, most)

    def flag(self, key: str, default: bool = REQUIRED) -> bool:
        """Return True or False."""
        value = self.get(key, default)
        return value if isinstance(value, bool) else self.refuse(key, value, "true or false")

    def word(self, key: str, default: str = REQUIRED) -> str:
        """Return a text."""
        value = self.get(key, default)
        return value if isinstance(value, str) else self.refuse(key, value, "a text")

    def choice(self, key: str, *allowed: T) -> T:
        """Return one of the allowed values, the first where the key is absent. Any other is refused by name."""
        value = self.get(key, allowed[0])
        for option in allowed:
            if type(option) is type(value) and option == value:
                return option
        return self.refuse(key, value, " or ".join(map(repr, allowed)))

    def choices(self, key: str, *allowed: str, default: Sequence[str] = REQUIRED, length: int) -> tuple[str, ...]:
        """Return a list of `length` allowed texts, such as the kinds of all layers."""
        values = self._list(key, default, length)
        for value in values:
            if value not in allowed:
                self.refuse(key, value, f"a list of {' or '.join(map(repr, allowed))}")
        return tuple(values)

    def numbers(
        self, key: str, default: Sequence[float] = REQUIRED, *, length: int, infinite: bool = False
    ) -> tuple[float, ...]:
        """Return a list of `length` numbers. infinite: Infinity and -Infinity are allowed."""
        most = math.inf if infinite else LARGEST_FLOAT
        return tuple(self._real(key, x, -most, most) for x in self._list(key, default, length))

    def sizes(self, key: str, default: Sequence[int] = REQUIRED, *, least: int = 0) -> tuple[int, ...]:
        """Return a list of whole numbers, such as the numbers of some layers."""
        return tuple(self._whole(key, x, least, None) for x in self._list(key, default, None))

    def inner(self, key: str) -> "Config":
        """Return the object under a key as a config of its own, an empty one where it is absent.

        `check_all_taken` of this config looks at its keys too.
        """
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            self.refuse(key, value, "an object")
        if key not in self._inner:
            self._inner[key] = Config(value, f"{self.place}, {key}")
        return self._inner[key]

    def text(self, *, tied: bool | None = None, **defaults: Any) -> "Config":
        """Return the config of the text model inside a composite (of text and images), or this one where it is none.

        `tie_word_embeddings` beside text_config counts more than the one in it, as in transformers; tied: its default there.
        defaults: values of keys that the text model's config lacks.
        """
        if not isinstance(self._values.get("text_config"), Mapping):
            return self
        fields = defaults | {key: x for key, x in self._values["text_config"].items() if x is not None}
        if (outer := self.get("tie_word_embeddings", tied)) is not None:
            fields["tie_word_embeddings"] = outer
        self.skip("text_config", "model_type")
        return Config(fields, f"{self.place}, text_config", self)

    def skip(self, *keys: str) -> None:
        """Mark keys that change no number."""
        self._taken.update(keys)

    def refuse(self, key: str, value: Any, expected: str) -> NoReturn:
        """Raise UserError for a value that is not possible, or not handled."""
        raise UserError(f"{self.place}: {key} must be {expected} here; got {value!r:.80}.")

    def check_all_taken(self, harmless: Collection[str] = ()) -> None:
        """Refuse a key that was not taken, unless it is null or known to change no number. harmless: patterns of more such."""
        for key, value in self._values.items():
            if key in self._taken or value is None or HARMLESS_VALUES.get(key, REQUIRED) == value:
                continue
            if any(fnmatchcase(key, pattern) for pattern in (*HARMLESS, *harmless)):
                continue
            if key == "auto_map":
                raise UserError(
                    f"{self.place} wants code of its own (auto_map), which is never run. Take a folder of a model that "
                    "transformers knows without trust_remote_code."
                )
            raise UserError(
                f"{self.place}: {key} = {value!r:.80} is not known for this family and may change its numbers. If it "
                f"does not, delete it from {FILE}."
            )
        for inner in self._inner.values():
            inner.check_all_taken(harmless)
        if self._outer is not None:
            self._outer.check_all_taken((*OF_COMPOSITES, *harmless))

    def _whole(self, key: str, value: Any, least: int, most: int | None) -> int:
        if most is None:
            most = MOST if any(fnmatchcase(key, pattern) for pattern in COUNTED) else LARGEST
        if type(value) is not int or not least <= value <= most:
            self.refuse(key, value, f"a whole number from {least:,} to {most:,}")
        return value

    def _real(self, key: str, value: Any, least: float, most: float) -> float:
        if (
            isinstance(value, Mapping)
            and value.keys() == {"__float__"}
            and value["__float__"] in ("Infinity", "-Infinity")
        ):
            value = float(value["__float__"])  # as transformers writes it
        if type(value) not in (int, float) or not least <= value <= most:
            finite = "a number" if most == math.inf else "a finite number"
            bounds = "" if max(-least, most) >= LARGEST_FLOAT and least < 0 else f" from {least:g} to {most:g}"
            self.refuse(key, value, finite + bounds)
        return float(value)

    def _list(self, key: str, default: Any, length: int | None) -> Sequence[Any]:
        values = self.get(key, default)
        if not isinstance(values, list | tuple) or length not in (None, len(values)):
            self.refuse(key, values, "a list" if length is None else f"a list of {length:,}")
        return values


def refuse_quantized(fields: Mapping[str, Any], place: str) -> None:
    """Refuse the config of a folder that another program has quantised, by the name of its method."""
    found = fields.get("quantization_config")
    if found is None or (
        isinstance(found, Mapping) and found.get("quant_method") == METHOD
    ):  # the mark of a converted model
        return
    method = found.get("quant_method", "unknown") if isinstance(found, Mapping) else found
    raise UserError(
        f"{place}: the weights are quantised ({method!s:.40}), which tarnn does not read. Take the model's folder in "
        "float32, bfloat16 or float16: tarnn quantises it as it opens (weights='int8' or 'int4')."
    )
