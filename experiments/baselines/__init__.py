"""The attentions that the papers compare with, each small and true, under names that a model's config takes.

    import experiments.baselines

    config = TarnnConfig(attention="baselines.lsh", attention_options={"baselines.lsh": {"rounds": 2}}, causal=False)

To import this package is to register them all: `baselines.NAME`, one file each. They are trained and measured, forward and
backward: no step, no state, no cache (`use_cache=False`). tarnn itself does not know them, and its command refuses a checkpoint
that names one.

To add one: a file here with a subclass of `interface.Baseline` and `@register("baselines.NAME")` from `tarnn.attention`.
"""

import importlib
import pkgutil

from tarnn.attention.registry import ATTENTIONS

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

NAMES = sorted(name for name in ATTENTIONS if name.startswith("baselines."))
