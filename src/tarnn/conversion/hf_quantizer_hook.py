"""Let `from_pretrained` load converted models: a hook gives their layers their maps before the weights are read.

transformers has one kind of extension that changes a model after it is built and before its weights are read:
quantizers. Ours quantizes nothing. A checkpoint names it in config.json ("quantization_config"), and once the weights are
read the model carries no mark of it.
"""

from typing import Any

from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from tarnn.checkpoint_keys import METHOD
from tarnn.conversion.options import CHILD, DEFAULTS, HYBRID, attach


class ConvertedConfig(QuantizationConfigMixin):
    """The mark in config.json. attention: the implementation that the model runs by default."""

    def __init__(self, attention: str = HYBRID, **kwargs: Any):
        if attention not in DEFAULTS:  # transformers would look for other names on the network
            raise ValueError(f"the attention of a converted model is {' or '.join(DEFAULTS)}; got {attention!r:.60}.")
        self.quant_method: Any = METHOD
        self.attention = attention


AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = ConvertedConfig  # in the place of a stand-in (`tarnn.auto_classes`)


@register_quantizer(METHOD)
class ConvertedLayers(HfQuantizer):
    """Give the layers their maps."""

    is_trainable = True
    quantization_config: ConvertedConfig

    def is_serializable(self) -> bool:
        return True

    def update_attn_implementation(self, config: Any) -> Any:
        if config._attn_implementation is None:
            config._attn_implementation = self.quantization_config.attention
        return config

    def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> None:
        attach(model)
        model._keep_in_fp32_modules_strict.add(CHILD)  # λ and maps are small, and 16 bits would lose their steps

    def postprocess_model(self, model: Any, **kwargs: Any) -> None:
        model.config.quantization_config = self.quantization_config
        del model.hf_quantizer
