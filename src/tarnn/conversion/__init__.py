"""Pretrained softmax models with linear or hybrid attention. Importing this makes both known to transformers:

model = AutoModel.from_pretrained(…, attn_implementation="tarnn_hybrid")
"""

from tarnn.conversion.cache import constant_cache
from tarnn.conversion.interface import AttentionOptions, register, set_options

register()

__all__ = ["AttentionOptions", "constant_cache", "set_options"]
