"""Models in plain torch: config, blocks, backbones, run as RNNs. No file here loads transformers.

Users also import from here the classes of `tarnn.huggingface`; with the first of them, all are registered with
transformers' Auto classes.
"""

from typing import TYPE_CHECKING

from tarnn.lazy import lazy_names

if TYPE_CHECKING:
    from tarnn.huggingface.registered import (
        Categorical as Categorical,
        ImageState as ImageState,
        LinearStateLayer as LinearStateLayer,
        LogisticMixture as LogisticMixture,
        ModelState as ModelState,
        SoftmaxStateLayer as SoftmaxStateLayer,
        SpeechFeatures as SpeechFeatures,
        TarnnConfig as TarnnConfig,
        TarnnForCausalLM as TarnnForCausalLM,
        TarnnForConditionalGeneration as TarnnForConditionalGeneration,
        TarnnForCTC as TarnnForCTC,
        TarnnForImageGeneration as TarnnForImageGeneration,
        TarnnForMaskedLM as TarnnForMaskedLM,
        TarnnForSequenceClassification as TarnnForSequenceClassification,
        TarnnForTokenClassification as TarnnForTokenClassification,
        TarnnImageConfig as TarnnImageConfig,
        TarnnModel as TarnnModel,
        TarnnSeq2SeqConfig as TarnnSeq2SeqConfig,
        TarnnSeq2SeqModel as TarnnSeq2SeqModel,
    )

__getattr__, __dir__ = lazy_names(__name__)
