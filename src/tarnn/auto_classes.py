"""transformers' Auto classes know tarnn's models after `import tarnn` alone, which imports neither torch nor transformers.

transformers has no entry points, but a mapping from the `model_type` in a config.json to a class. As soon as that mapping
is imported, by whomever, tarnn's names are put into it with a stand-in, which imports `tarnn.models` (and so registers
the classes themselves) when a checkpoint first asks for it.
"""

import importlib
import importlib.util
import sys

MODEL_TYPES = ("tarnn", "tarnn_image", "tarnn_seq2seq")
_MAPPING = "transformers.models.auto.configuration_auto"


class ConfigOnDemand:
    """Stands for a config's class until it is used."""

    def __init__(self, model_type: str):
        self.model_type = model_type

    def __call__(self, *args, **kwargs):
        return self._load()(*args, **kwargs)

    def __getattr__(self, name: str):
        if name.startswith("__"):  # what copy, pickle and inspect look for
            raise AttributeError(name)
        return getattr(self._load(), name)

    def _load(self):
        importlib.import_module("tarnn.models.registered")
        return sys.modules[_MAPPING].CONFIG_MAPPING[self.model_type]


class _WhenImported:
    """A finder that does what all the others do, and registers once the mapping is there."""

    def find_spec(self, name: str, path=None, target=None):
        if name != _MAPPING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module) -> None:
                run(module)
                _register(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register(module) -> None:
    for model_type in MODEL_TYPES:
        if model_type not in module.CONFIG_MAPPING:
            module.CONFIG_MAPPING.register(model_type, ConfigOnDemand(model_type))


def announce() -> None:
    """Registers now if transformers is there already, else when it comes."""
    if _MAPPING in sys.modules:
        _register(sys.modules[_MAPPING])
    else:
        sys.meta_path.insert(0, _WhenImported())
