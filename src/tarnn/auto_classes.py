"""Make tarnn's models, and converted ones, known to transformers' Auto classes by `import tarnn` alone.

That imports neither torch nor transformers.

transformers has no entry points, but a mapping from the `model_type` in a config.json to a class. As soon as that mapping
is imported, by whomever, tarnn's names are put into it with a stand-in, which imports `tarnn.models` (and so registers
the classes themselves) when a checkpoint first asks for it. The same for its mapping from a "quant_method", by which
a converted model asks for `tarnn.conversion` (see `tarnn.conversion.hf_quantizer_hook`).
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable

from tarnn.checkpoint_keys import METHOD, MODEL_TYPES

_MAPPING = "transformers.models.auto.configuration_auto"
_METHODS = "transformers.quantizers.auto"


class ConfigOnDemand:
    """A stand-in for a config's class until it is used."""

    def __init__(self, model_type: str):
        self.model_type = model_type

    def __call__(self, *args, **kwargs):
        return self._load()(*args, **kwargs)

    def __getattr__(self, name: str):
        if name.startswith("__"):  # what copy, pickle and inspect look for
            raise AttributeError(name)
        return getattr(self._load(), name)

    def _load(self):
        importlib.import_module("tarnn.huggingface.registered")
        return sys.modules[_MAPPING].CONFIG_MAPPING[self.model_type]


class ConversionOnDemand:
    """A stand-in for the config of converted models until one is read."""

    @staticmethod
    def from_dict(*args, **kwargs):
        importlib.import_module("tarnn.conversion")
        return sys.modules[_METHODS].AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD].from_dict(*args, **kwargs)


class _WhenImported:
    """A finder that leaves finding to the others, and registers as soon as a mapping is imported."""

    def __init__(self, mapping: str, register: Callable):
        self.mapping, self.register = mapping, register

    def find_spec(self, name: str, path=None, target=None):
        if name != self.mapping:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module) -> None:
                run(module)
                self.register(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register_configs(module) -> None:
    for model_type in MODEL_TYPES:
        if model_type not in module.CONFIG_MAPPING:
            module.CONFIG_MAPPING.register(model_type, ConfigOnDemand(model_type))


def _register_method(module) -> None:
    module.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, ConversionOnDemand)


def announce() -> None:
    """Register now if transformers is imported already, else when it is."""
    for mapping, register in ((_MAPPING, _register_configs), (_METHODS, _register_method)):
        if mapping in sys.modules:
            register(sys.modules[mapping])
        else:
            sys.meta_path.insert(0, _WhenImported(mapping, register))
