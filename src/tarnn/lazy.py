"""Packages whose names are imported when they are first used, so that `import tarnn` costs nothing."""

import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's `__getattr__` and `__dir__`, which know the names in its `__all__`, and its files.

    Where a name comes from, the package says once, to type checkers and to this function: by the imports in its
    `if TYPE_CHECKING:`, which are read from its source when a name is first looked up. A `*` there stands for all other
    names in `__all__`.
    """
    namespace = vars(sys.modules[package])

    @cache
    def homes() -> dict[str, str]:
        import ast

        homes: dict[str, str] = {}
        for branch in ast.parse(namespace["__loader__"].get_source(package)).body:
            for node in branch.body if isinstance(branch, ast.If) else ():
                if isinstance(node, ast.ImportFrom):
                    names = [alias.name for alias in node.names]
                    names = namespace["__all__"] if names == ["*"] else names
                    homes = dict.fromkeys(names, str(node.module)) | homes
        return homes

    def load(name: str) -> Any:
        module = f"{package}.{name}"
        if name in namespace["__all__"]:
            value = namespace[name] = getattr(importlib.import_module(homes()[name]), name)
            return value
        try:
            if not name.startswith("_"):
                return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(namespace['__all__'])}")

    def list_names() -> list[str]:
        import pkgutil

        files = (file.name for file in pkgutil.iter_modules(namespace["__path__"]))
        return sorted({*namespace, *namespace["__all__"], *files})

    return load, list_names
