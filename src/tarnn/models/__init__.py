"""Models in the Hugging Face manner. Importing this registers them with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tarnn.models.backbone import TarnnModel
from tarnn.models.cache import LinearStateLayer, SoftmaxStateLayer
from tarnn.models.causal_lm import TarnnForCausalLM
from tarnn.models.configuration import TarnnConfig
from tarnn.models.state import ModelState

AutoConfig.register("tarnn", TarnnConfig)
AutoModel.register(TarnnConfig, TarnnModel)
AutoModelForCausalLM.register(TarnnConfig, TarnnForCausalLM)

__all__ = [
    "LinearStateLayer",
    "ModelState",
    "SoftmaxStateLayer",
    "TarnnConfig",
    "TarnnForCausalLM",
    "TarnnModel",
]
