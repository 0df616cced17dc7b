"""Small models of ours for exports: folders with a tokenizer of bytes, all of whose weights are random."""

import torch

from tarnn.data.tokenizers import byte_tokenizer
from tarnn.models import TarnnConfig, TarnnForCausalLM

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "initializer_range": 0.3}
ENDS = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}


def make_model(**choices) -> TarnnForCausalLM:
    """Make a model in evaluation; what begins as zeros or ones is drawn, too."""
    torch.manual_seed(1)
    model = TarnnForCausalLM(TarnnConfig(**{**SIZES, **ENDS, **choices})).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.ndim == 1 or not name.endswith("proj.weight"):
                x += 0.1 * torch.randn(x.shape)
    return model


def save_run(folder, **choices) -> TarnnForCausalLM:
    """Save such a model and its tokenizer; return it."""
    model = make_model(**choices)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model
