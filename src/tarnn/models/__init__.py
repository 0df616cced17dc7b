"""Models in plain torch: config, blocks, backbones, run as RNNs. No file here loads transformers.

Users also import from here the classes of `tarnn.huggingface`; with the first of them, all are registered with
transformers' Auto classes.
"""

from typing import TYPE_CHECKING

from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.huggingface.registered import *  # noqa: F403

__all__ = [  # noqa: F405
    "Categorical",
    "ImageState",
    "LinearStateLayer",
    "LogisticMixture",
    "ModelState",
    "SoftmaxStateLayer",
    "SpeechFeatures",
    "TarnnConfig",
    "TarnnForCTC",
    "TarnnForCausalLM",
    "TarnnForConditionalGeneration",
    "TarnnForImageGeneration",
    "TarnnForMaskedLM",
    "TarnnForSequenceClassification",
    "TarnnForTokenClassification",
    "TarnnImageConfig",
    "TarnnModel",
    "TarnnSeq2SeqConfig",
    "TarnnSeq2SeqModel",
]

__getattr__, __dir__ = lazy_names(__name__)
