"""The tensors of a model by name: from a folder's safetensors files, mapped and not copied, or from a live model.

A family takes each tensor with the shape that its config gives, and says at the end which others it may leave:

    layer = weights.under(f"model.layers.{i}.")
    w = layer.get("self_attn.q_proj.weight", (heads * head_dim, hidden))
    weights.check_all_taken("mtp.*")

Tensors come in the type of their file. Pages of the file are read when a tensor is used, and the system may drop them
again: opening a model takes no memory of its own. The files must not be changed meanwhile.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tarnn.errors import UserError
from tarnn.weight_files import (
    FLOATS,
    FOREIGN,
    INDEX,
    INTACT,
    INTEGERS,
    WEIGHTS,
    Header,
    read_header,
    read_index,
    weight_files,
)

MAY_LEAVE = ("*rotary_emb.inv_freq",)  # buffers of old versions of transformers, computed from the config
LISTED = 10
ADDED = ".tarnn."  # in names of tensors that conversion added
KINDS = {**FLOATS, **INTEGERS, "BOOL": torch.bool}
NAMES = {dtype: kind for kind, dtype in KINDS.items()}


class MissingWeights(UserError):
    """Weights that a config calls for are missing."""


@dataclass(frozen=True)
class Source:
    """Tensors to be taken. header: name → (type, shape). read: the tensor of a name.

    taken: names, as they are taken or marked. used: those among them whose numbers the model is made of. lacking: names that
    were asked for in vain; None: the first one is refused.
    """

    place: str
    header: Header
    read: Callable[[str], Tensor]
    taken: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    lacking: list[str] | None = None


class Weights:
    """The tensors of a source whose names begin with `prefix`, by the rest of their names.

    renamed: (what whole names begin with here, what they begin with in the source).
    """

    def __init__(self, source: Source, prefix: str = "", renamed: tuple[str, str] = ("", "")):
        self._source = source
        self._prefix = prefix
        self._renamed = renamed

    @classmethod
    def read(cls, folder: str | Path) -> "Weights":
        """Open the weights in a folder: model.safetensors, or the files of its index. Raises UserError, in one sentence."""
        return cls(folder_source(Path(folder)))

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], place: str = "the model") -> "Weights":
        """Take the tensors of a live model's state_dict, which must be plain ones with numbers. They are not copied."""
        for name, x in tensors.items():
            if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.is_meta:
                kind = "without numbers (on the meta device)" if x.is_meta else f"a {type(x).__name__} ({x.layout})"
                raise UserError(f"{place}: {name} is {kind}; expected a plain tensor. Load the model whole, unsharded.")
        header = {name: (NAMES.get(x.dtype, str(x.dtype)), tuple(x.shape)) for name, x in tensors.items()}
        check_kinds(place, header)
        return cls(Source(place, header, lambda name: tensors[name].detach()))

    @property
    def place(self) -> str:
        """The folder, for messages."""
        return self._source.place

    def __contains__(self, name: str) -> bool:
        return self._whole(name) in self._source.header

    def __iter__(self) -> Iterator[str]:
        prefix = self._whole("")
        return (name.removeprefix(prefix) for name in self._source.header if name.startswith(prefix))

    def __getitem__(self, name: str) -> Tensor:
        """Take a tensor: on the CPU, in the type of the file, to be read only. Raises UserError where it is missing."""
        self.shape(name)
        self.skip(name)
        self._source.used.add(self._whole(name))
        return self._source.read(self._whole(name))

    def get(self, name: str, shape: tuple[int, ...], *, whole: bool = False) -> Tensor:
        """Take a tensor that must have this shape, and a floating type. whole: it must have whole numbers instead."""
        if name not in self and self._source.lacking is not None:
            self._source.lacking.append(self._whole(name))
            if len(self._source.lacking) > LISTED:
                raise self.missing()
            return torch.zeros(()).expand(shape)
        if self.shape(name) != shape:
            raise UserError(
                f"{self.place} has {self._whole(name)} of shape {self.shape(name)} where the config calls for {shape}. "
                f"{FOREIGN}"
            )
        if self.dtype(name).is_floating_point == whole:
            kind = f"has {self._whole(name)} in {self.dtype(name)}"
            raise UserError(f"{self.place} {kind}; expected {'whole' if whole else 'real'} numbers. {INTACT}")
        return self[name]

    def glance(self, name: str) -> Tensor:
        """Read a tensor without taking it. Raises UserError where it is missing."""
        self.shape(name)
        return self._source.read(self._whole(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without taking it. Raises UserError where it is missing."""
        if name not in self:
            if self._source.lacking is not None:
                self._source.lacking.append(self._whole(name))
            raise self.missing(name)
        return self._source.header[self._whole(name)][1]

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type, without taking it."""
        self.shape(name)
        return KINDS[self._source.header[self._whole(name)][0]]

    def missing(self, *names: str) -> MissingWeights:
        """Make the refusal of weights that are missing, and of those that were asked for in vain before."""
        lacking = [*dict.fromkeys([*(self._source.lacking or ()), *map(self._whole, names)])]
        more = " and more" if len(lacking) > LISTED else ""
        return MissingWeights(f"{self.place} lacks the weights {', '.join(lacking[:LISTED])}{more}. {FOREIGN}")

    def noting(self) -> "Weights":
        """Return the same tensors, with zeros in the place of missing ones, which `missing` names: to find them all."""
        return Weights(replace(self._source, taken=set(), used=set(), lacking=[]), self._prefix, self._renamed)

    def under(self, prefix: str) -> "Weights":
        """Return the tensors whose names begin with `prefix` as weights of their own, by the rest of their names."""
        return Weights(self._source, self._prefix + prefix, self._renamed)

    def renamed(self, here: str, there: str) -> "Weights":
        """Return the same tensors, where names that begin with `here` stand for those that begin with `there`."""
        return Weights(self._source, self._prefix, (here, there))

    def _whole(self, name: str) -> str:
        """Return a tensor's whole name in the source."""
        whole, (here, there) = self._prefix + name, self._renamed
        return there + whole.removeprefix(here) if whole.startswith(here) else whole

    def tied(self, name: str, other: str, shape: tuple[int, ...]) -> Tensor:
        """Take `other`, whose numbers `name` stands for. If `name` is there too, it must have the same numbers."""
        x = self.get(other, shape)
        if name not in self:
            return x
        copy = self.get(name, shape)
        self._source.used.discard(self._whole(name))  # these numbers are there already
        if not copy.is_set_to(x) and not torch.equal(copy, x):
            raise UserError(
                f"{self.place} has other numbers in {self._whole(name)} than in {self._whole(other)}, which the config "
                "ties (tie_word_embeddings). Set it to false in config.json if the model was trained so."
            )
        return x

    def same(self, name: str, other: "Weights") -> None:
        """Mark `name` of other weights, of the same source, which must have the numbers that it has here."""
        other.skip(name)
        ours, theirs = self._source.read(self._prefix + name), other._source.read(other._prefix + name)
        if ours.shape != theirs.shape or not torch.equal(ours, theirs):
            raise UserError(
                f"{self.place} has other numbers in {other._prefix}{name} than in {self._prefix}{name}, which are one "
                f"shared tensor. {FOREIGN}"
            )

    def used(self) -> Mapping[str, Tensor]:
        """Return the tensors that were taken, by their whole names; of tied ones the first. Each is read when it is looked up."""
        return Used(sorted(self._source.used), self._source.read)

    def check_finite(self) -> None:
        """Refuse weights, among those that were taken, with NaN or an infinity in them. They are read once for it."""
        for name, x in self.used().items():
            if x.is_floating_point() and x.numel() and not torch.stack(x.aminmax()).isfinite().all():
                raise UserError(f"{self.place} holds NaN or an infinity in {name}: the training diverged. {INTACT}")

    def left(self) -> list[str]:
        """Return the whole names of the tensors that were not taken."""
        return sorted(self._source.header.keys() - self._source.taken)

    def changed(self, names: Sequence[str], change: Callable[[str, Tensor], Tensor]) -> "Weights":
        """Return the same weights, where tensors of these whole names come as `change` returns them, in their own shape."""
        source, chosen = self._source, frozenset(names)

        def read(name: str) -> Tensor:
            return change(name, source.read(name)) if name in chosen else source.read(name)

        return Weights(replace(source, read=read), self._prefix, self._renamed)

    def cast(self, dtype: torch.dtype) -> "Weights":
        """Return the same weights, whose real numbers come in another type. Each tensor is a copy then.

        What conversion added to a layer stays as it is: it is small, and 16 bits would lose what was calibrated.
        """
        source = self._source

        def read(name: str) -> Tensor:
            x = source.read(name)
            return x.to(dtype) if x.is_floating_point() and ADDED not in name else x

        header = {
            name: (NAMES[dtype] if kind in FLOATS and ADDED not in name else kind, shape)
            for name, (kind, shape) in source.header.items()
        }
        return Weights(replace(source, header=header, read=read), self._prefix, self._renamed)

    def skip(self, *names: str) -> None:
        """Mark tensors that change no number."""
        self._source.taken.update(map(self._whole, names))

    def skip_matching(self, *patterns: str) -> None:
        """Mark tensors that other parts of the model have, by patterns of whole names."""
        self._source.taken.update(x for x in self.left() if any(fnmatchcase(x, pattern) for pattern in patterns))

    def check_all_taken(self, *may_leave: str) -> None:
        """Refuse tensors of the source that were not taken. may_leave: patterns of whole names, as "mtp.*"."""
        patterns = (*MAY_LEAVE, *may_leave)
        left = [name for name in self.left() if not any(fnmatchcase(name, pattern) for pattern in patterns)]
        if left:
            more = f" and {len(left) - LISTED:,} more" if len(left) > LISTED else ""
            raise UserError(
                f"{self.place} holds weights that its config does not call for: {', '.join(left[:LISTED])}{more}. {FOREIGN}"
            )


class Used(Mapping[str, Tensor]):
    """Tensors by name that are read when they are looked up, so that those which are computed take no memory meanwhile."""

    def __init__(self, names: Sequence[str], read: Callable[[str], Tensor]):
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def folder_source(folder: Path) -> Source:
    """Read the headers of a folder's files; the tensors are mapped when they are taken."""
    files = weight_files(folder)
    source, home = files_source(str(folder), files)
    if len(files) > 1 or files[0].name != WEIGHTS:
        check_index(folder, home)
    return source


def files_source(place: str, files: Sequence[Path]) -> tuple[Source, dict[str, Path]]:
    """Read the headers of files; return their tensors, and in which file each of them is."""
    home: dict[str, Path] = {}
    header: Header = {}
    for file in files:
        facts = read_header(file)
        if twice := sorted(header.keys() & facts.keys()):
            raise UserError(f"{home[twice[0]]} and {file.name} both hold {twice[0]}. {INTACT}")
        header |= facts
        home |= dict.fromkeys(facts, file)
    check_kinds(place, header)
    opened = {}

    def read(name: str) -> Tensor:
        file = home[name]
        try:
            if file not in opened:
                opened[file] = safe_open(file, "pt")
            x: Tensor = opened[file].get_tensor(name)
            return x if x.data_ptr() % x.itemsize == 0 else x.clone()  # no number lies across its boundary
        except (SafetensorError, OSError, RuntimeError) as error:
            raise UserError(f"{file} can't be read: {name} is damaged ({error}). {INTACT}") from error

    return Source(place, header, read), home


def check_index(folder: Path, home: Mapping[str, Path]) -> None:
    """Refuse files that do not hold what their index says."""
    for name, file in read_index(folder).items():
        if name not in home or home[name].name != file:
            raise UserError(
                f"{folder / file} lacks {name}, which {INDEX} lists in it: the files are of two models, or one was not written "
                f"to its end. {INTACT}"
            )


def check_kinds(place: str, header: Header) -> None:
    """Refuse types of numbers that only quantised weights have, such as float8."""
    for name, (kind, _) in header.items():
        if kind not in KINDS:
            raise UserError(
                f"{place} has {name} as {kind}; expected float32, bfloat16 or float16. Take the model's folder in one of "
                "these: tarnn quantises it as it opens (weights='int8' or 'int4')."
            )
