"""Pretrained softmax models with linear or hybrid attention. Importing this makes both known to transformers:

model = AutoModel.from_pretrained(…, attn_implementation="tarnn_hybrid")
"""

from tarnn.extras import needed_for

with needed_for("tarnn.conversion"):
    import transformers  # noqa: F401

from tarnn.conversion import fused, hf_quantizer_hook  # noqa: F401  (register themselves)
from tarnn.conversion.cache import constant_cache
from tarnn.conversion.cache_file import load_cache, save_cache
from tarnn.conversion.convert import convert
from tarnn.conversion.finetune import finetune
from tarnn.conversion.interface import register
from tarnn.conversion.options import AttentionOptions, attention_layers, set_options

register()

__all__ = [
    "AttentionOptions",
    "attention_layers",
    "constant_cache",
    "convert",
    "finetune",
    "load_cache",
    "save_cache",
    "set_options",
]
