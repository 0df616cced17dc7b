"""Register the classes of `tarnn.models` with transformers' Auto classes, on import."""

# ruff: noqa: F401

from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForAudioClassification,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tarnn.huggingface.backbone import TarnnModel
from tarnn.huggingface.cache import LinearStateLayer, SoftmaxStateLayer
from tarnn.huggingface.causal_lm import TarnnForCausalLM
from tarnn.huggingface.config import TarnnConfig
from tarnn.huggingface.heads import (
    TarnnForCTC,
    TarnnForMaskedLM,
    TarnnForSequenceClassification,
    TarnnForTokenClassification,
)
from tarnn.huggingface.image_config import TarnnImageConfig
from tarnn.huggingface.image_generation import TarnnForImageGeneration
from tarnn.huggingface.seq2seq import TarnnForConditionalGeneration, TarnnSeq2SeqModel
from tarnn.huggingface.seq2seq_config import TarnnSeq2SeqConfig
from tarnn.huggingface.speech_features import SpeechFeatures
from tarnn.models.images import ImageState
from tarnn.models.likelihoods import Categorical, LogisticMixture
from tarnn.models.state import ModelState

AutoConfig.register("tarnn", TarnnConfig)
AutoModel.register(TarnnConfig, TarnnModel)
AutoModelForCausalLM.register(TarnnConfig, TarnnForCausalLM)
AutoModelForMaskedLM.register(TarnnConfig, TarnnForMaskedLM)
AutoModelForSequenceClassification.register(TarnnConfig, TarnnForSequenceClassification)
AutoModelForAudioClassification.register(TarnnConfig, TarnnForSequenceClassification)
AutoModelForTokenClassification.register(TarnnConfig, TarnnForTokenClassification)
AutoModelForCTC.register(TarnnConfig, TarnnForCTC)
AutoFeatureExtractor.register(TarnnConfig, SpeechFeatures)
AutoConfig.register("tarnn_seq2seq", TarnnSeq2SeqConfig)
AutoModel.register(TarnnSeq2SeqConfig, TarnnSeq2SeqModel)
AutoModelForSeq2SeqLM.register(TarnnSeq2SeqConfig, TarnnForConditionalGeneration)
AutoConfig.register("tarnn_image", TarnnImageConfig)
AutoModel.register(TarnnImageConfig, TarnnForImageGeneration)
