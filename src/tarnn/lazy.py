"""Packages whose names are imported when they are first used, so that `import tarnn` costs nothing."""

import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from tarnn import removed


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's `__getattr__` and `__dir__`, which know its public names, and its files.

    The package states each name and its home once, to type checkers and to this function: by the imports in its
    `if TYPE_CHECKING:`, which are read from its source when a name is first looked up. They are its `__all__`.
    """
    namespace = vars(sys.modules[package])

    @cache
    def homes() -> dict[str, str]:
        import ast

        branches = (
            x.body for x in ast.parse(namespace["__loader__"].get_source(package)).body if isinstance(x, ast.If)
        )
        imports = (node for body in branches for node in body if isinstance(node, ast.ImportFrom))
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> Any:
        if name == "__all__":
            return sorted(homes())
        if name in homes():
            value = namespace[name] = getattr(importlib.import_module(homes()[name]), name)
            return value
        module = f"{package}.{name}"
        if gone := removed.message(module):
            raise AttributeError(gone)
        try:
            if not name.startswith("_"):
                return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes()))}")

    def list_names() -> list[str]:
        import pkgutil

        files = (file.name for file in pkgutil.iter_modules(namespace["__path__"]))
        return sorted({*namespace, *homes(), *files})

    return load, list_names
