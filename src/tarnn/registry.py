"""Names of classes: a class declares its name once; the options of the name are the arguments of the class."""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Set
from functools import cache
from typing import Any, NamedTuple, TypeVar

from tarnn.removed import message

Kind = TypeVar("Kind", bound=type)


class Named(NamedTuple):
    """The meaning of a name: a class, and the options that the name implies."""

    kind: Any
    implied: Mapping[str, Any]


class Registry(dict[str, Named]):
    """A dict of names and the decorator that fills it.

    what: the kind of thing that is named, for messages. package: its modules declare the names; they are imported when a
    name is first looked up, not before. Classes of your own may be registered from anywhere. others: other names
    for the same; such a name is understood, but neither listed nor saved.
    """

    def __init__(self, what: str, package: str, others: Mapping[str, str] | None = None):
        super().__init__()
        self.what, self.package, self.others, self.loaded = what, package, dict(others or {}), False

    def own_name(self, name: Any) -> Any:
        """Turn one of the other names into the name that is saved."""
        return self.others.get(name, name) if isinstance(name, str) else name

    def register(self, name: str, **implied: Any) -> Callable[[Kind], Kind]:
        """Make a decorator that gives a class this name. Raises ValueError if another class has it."""

        def declare(kind: Kind) -> Kind:
            other = self.get(name)
            if other is not None and other.kind.__qualname__ != kind.__qualname__:
                raise ValueError(f"there is a {self.what} called {name!r} already: {other.kind.__qualname__}.")
            self[name] = Named(kind, implied)
            return kind

        return declare

    def names(self) -> list[str]:
        """All names, sorted. Those with a dot are found but not listed: a package outside tarnn declares them."""
        if not self.loaded:
            package = importlib.import_module(self.package)
            for module in pkgutil.iter_modules(package.__path__, f"{self.package}."):
                importlib.import_module(module.name)
            self.loaded = True
        return sorted(name for name in self if "." not in name)

    def find(self, name: str) -> Named:
        """Look up a name. Raises ValueError for an unknown one, with those that are known."""
        name = self.own_name(name)
        if name not in self and name not in self.names():
            close = difflib.get_close_matches(str(name), [*self.names(), *self.others], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            if isinstance(name, str) and "." in name:
                hint = (
                    f" A package outside tarnn declares the names {name.rpartition('.')[0]}.*: "
                    "only a program that imports it can use the model; this one doesn't."
                )
            raise ValueError(
                f"{self.what.replace(' ', '_')} must be one of {', '.join(self.names())}; got {name!r}.{hint}"
            )
        return self[name]

    def name_of(self, kind: type) -> str:
        """The name of a class that implies no options. Raises ValueError for a class without a name."""
        for name in self.names():
            if self[name].kind is kind and not self[name].implied:
                return name
        raise ValueError(
            f'{kind.__name__} has no name that a config could hold; give the class one: @{self.package}.register("…").'
        )

    def build(self, name: str, context: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Make an object of the class of this name, with the options and with those of its arguments that `context` has.

        Raises ValueError for options that it does not have or can't take.
        """
        kind, implied = self.find(name)
        takes = arguments_of(kind)
        self.check_options(name, options, takes - set(context))
        arguments = {key: value for key, value in {**context, **implied}.items() if key in takes}
        try:
            return kind(**arguments | dict(options))
        except TypeError as error:
            raise ValueError(f"the {self.what} {name!r} can't be made with {dict(options)}: {error}.") from error

    def check_options(self, name: str, options: Mapping[str, Any], known: Set[str]) -> None:
        """Raise ValueError for options that are not among the known ones."""
        if unknown := sorted(set(options) - known):
            gone = "".join(f" {message(f'{self[name].kind.__name__}({option}=)')}" for option in unknown)
            raise ValueError(
                f"the {self.what} {name!r} has no option {', '.join(map(repr, unknown))}; "
                f"it takes {', '.join(sorted(known)) or 'none'}.{gone}".rstrip()
            )


@cache
def arguments_of(kind: type) -> frozenset[str]:
    """The names of the arguments of a class's constructor; if it hands on others (`**`), those of its base class, too."""
    names: set[str] = set()
    for home in (x for x in kind.__mro__ if "__init__" in vars(x)):
        parameters = inspect.signature(home.__init__).parameters.values()  # type: ignore[misc]
        names |= {x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}
        if not any(x.kind is x.VAR_KEYWORD for x in parameters):
            break
    return frozenset(names - {"self"})
