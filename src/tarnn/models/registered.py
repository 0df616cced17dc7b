"""All names of `tarnn.models`. Importing this registers them with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tarnn.models.backbone import TarnnModel
from tarnn.models.cache import LinearStateLayer, SoftmaxStateLayer
from tarnn.models.causal_lm import TarnnForCausalLM
from tarnn.models.configuration import TarnnConfig
from tarnn.models.image_configuration import TarnnImageConfig
from tarnn.models.image_generation import TarnnForImageGeneration
from tarnn.models.likelihoods import Categorical, LogisticMixture
from tarnn.models.recurrent_images import ImageState
from tarnn.models.state import ModelState

AutoConfig.register("tarnn", TarnnConfig)
AutoModel.register(TarnnConfig, TarnnModel)
AutoModelForCausalLM.register(TarnnConfig, TarnnForCausalLM)
AutoConfig.register("tarnn_image", TarnnImageConfig)
AutoModel.register(TarnnImageConfig, TarnnForImageGeneration)

__all__ = [
    "Categorical", "ImageState", "LinearStateLayer", "LogisticMixture", "ModelState", "SoftmaxStateLayer",
    "TarnnConfig", "TarnnForCausalLM", "TarnnForImageGeneration", "TarnnImageConfig", "TarnnModel",
]  # fmt: skip
