"""The tokenizer of a folder, read from tokenizer.json as data: no class of transformers, no code of the folder."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tarnn.decoding.chat_template import DEFAULT, WITH_TOOLS, read_chat_templates, render
from tarnn.errors import UserError
from tarnn.json_file import read_json

FILE, SETTINGS, SPECIAL_MAP, ADDED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHERS = ("*.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt")  # formats that are not read


@dataclass(frozen=True)
class SavedTokenizer:
    """A tokenizer of prompts and their continuations. special: its special tokens by their names, such as bos_token."""

    backend_tokenizer: Tokenizer
    bos_token_id: int | None
    eos_token_id: int | None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    special: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of tokens, with those that were added to the vocabulary."""
        return self.backend_tokenizer.get_vocab_size()

    @property
    def chat_template(self) -> str | None:
        """The usual template of a conversation; None where the folder has none."""
        return self.chat_templates.get(DEFAULT)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of tokens that are no text."""
        return [i for i, token in self.backend_tokenizer.get_added_tokens_decoder().items() if token.special]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. add_special_tokens: with those that the tokenizer puts around every text."""
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids, in which nothing is tidied."""
        return self.backend_tokenizer.decode([*map(int, ids)], skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]:
        """Return the names of tokens, None for ids without one."""
        return [self.backend_tokenizer.id_to_token(int(i)) for i in ids]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        **names: Any,
    ) -> str:
        """Write a conversation as one text, as transformers does with tokenize=False. There must be a template.

        names: more that the template may use, such as enable_thinking. Raises what the template raises where it does not
        take these messages.
        """
        assert not tokenize
        template = self.chat_template
        if tools is not None:
            template = self.chat_templates.get(WITH_TOOLS, template)
        assert template is not None
        fixed = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        return render(template, messages, **(fixed | dict(self.special) | names))


def open_tokenizer(path: str | Path) -> SavedTokenizer:
    """Open the tokenizer saved beside a model. Raises UserError where it is missing or can't be read.

    It is read from tokenizer.json, whatever class tokenizer_config.json names, and that file says which tokens stand around a
    text (as in transformers, whatever add_bos_token says). Special tokens, added tokens and templates are read from the
    other files.
    """
    folder = Path(path)
    if not (folder / FILE).is_file():
        raise missing(folder)
    settings = settings_of(folder)
    special = {name: text_of(settings[name], folder) for name in NAMED if settings.get(name) is not None}
    try:
        backend = Tokenizer.from_file(str(folder / FILE))
        backend.no_truncation()  # a file may ask to cut every text, or to fill it up
        backend.no_padding()
        add_tokens(backend, folder, settings)
        if unknown := [special[x] for x in NAMED[:2] if x in special and backend.token_to_id(special[x]) is None]:
            raise ValueError(f"its vocabulary lacks the special token {unknown[0]!r}")
        backend.add_special_tokens([x for x in special.values() if backend.token_to_id(x) is not None])
        bos, eos = (backend.token_to_id(special[name]) if name in special else None for name in NAMED[:2])
        backend.decode(backend.encode("a \N{SNOWMAN} 語").ids)  # some faults show in use only
    except UserError:
        raise
    except BaseException as error:  # the tokenizers library raises bare Exceptions, and panics, which are none
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"the tokenizer in {path} can't be read: {' '.join(str(error).split())[:300]}. Copy it from the checkpoint's origin."
        ) from error
    return SavedTokenizer(backend, bos, eos, read_chat_templates(folder, settings), special)


def missing(folder: Path) -> UserError:
    """Name what a folder without tokenizer.json has in its place."""
    others = sorted(file.name for pattern in OTHERS for file in folder.glob(pattern))
    if not others:
        return UserError(f"{folder} holds no tokenizer ({FILE}). Copy it from the checkpoint's origin.")
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    own = ", and wants code of its own (auto_map)" if settings.get("auto_map") else ""
    return UserError(
        f"{folder} holds its tokenizer as {others[0]}{own}; expected {FILE}. Where you trust the folder, transformers writes "
        f"that file: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
    )


def settings_of(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, completed by special_tokens_map.json of older versions of transformers."""
    settings: dict[str, Any] = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    if "added_tokens_decoder" not in settings and (folder / SPECIAL_MAP).is_file():
        settings |= read_json(folder / SPECIAL_MAP)
    return settings


def text_of(token: Any, folder: Path) -> str:
    """Return the text of a token as a settings file writes it: itself, or an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise UserError(f"a special token in {folder / SETTINGS} must be a text; got {token!r:.60}.")
    return text


def add_tokens(backend: Tokenizer, folder: Path, settings: Mapping[str, Any]) -> None:
    """Add tokens that stand beside tokenizer.json, each at its id. Raises ValueError for one whose id is another's."""
    beside: dict[int, AddedToken] = {}
    for key, facts in dict(settings.get("added_tokens_decoder") or {}).items():
        flags = {x: bool(facts[x]) for x in ("single_word", "lstrip", "rstrip", "normalized", "special") if x in facts}
        beside[int(key)] = AddedToken(facts["content"], **flags)
    if not beside and (folder / ADDED).is_file():
        special = {text_of(settings[x], folder) for x in NAMED if settings.get(x) is not None}
        for text, i in read_json(folder / ADDED).items():
            beside[int(i)] = AddedToken(text, normalized=text not in special, special=text in special)
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    for i, token in sorted(beside.items(), key=lambda pair: pair[0]):
        if repr(token) not in known:
            backend.add_tokens([token])
        if backend.token_to_id(token.content) != i:
            raise ValueError(
                f"the token {token.content!r:.60} has the id {backend.token_to_id(token.content)}, not {i}"
            )
    more = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    texts = [text_of(x, folder) for x in (more.values() if isinstance(more, dict) else more)]
    backend.add_special_tokens([x for x in texts if backend.token_to_id(x) is not None])
