"""How `from_pretrained` comes to load converted models: their layers get their maps before the weights are read.

transformers has one place for extensions that change a model between its making and the reading of its weights: what it
calls quantizers. Ours quantizes nothing. A checkpoint names it in config.json ("quantization_config"), and once the
weights are read the model carries no mark of it.
"""

from typing import Any

from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from tarnn.auto_classes import METHOD
from tarnn.conversion.options import CHILD, DEFAULTS, HYBRID, attach


class ConvertedConfig(QuantizationConfigMixin):
    """What config.json says: attention, the implementation that the model runs unless another is asked for."""

    def __init__(self, attention: str = HYBRID, **kwargs: Any):
        if attention not in DEFAULTS:  # transformers would look for other names on the network
            raise ValueError(f"the attention of a converted model is {' or '.join(DEFAULTS)}; got {attention!r:.60}.")
        self.quant_method: Any = METHOD
        self.attention = attention


AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = ConvertedConfig  # in the place of a stand-in (`tarnn.auto_classes`)


@register_quantizer(METHOD)
class ConvertedLayers(HfQuantizer):
    """Gives the layers their maps, and takes nothing away."""

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
