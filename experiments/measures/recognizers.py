"""Recognizers of speech that an experiment compares: one front, one output, and between them an attention or an LSTM."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import experiments.baselines  # noqa: F401  LSH attention, by its name
from measures.utterances import Data
from tarnn.models import TarnnConfig, TarnnForCTC

ATTENTION = {  # else as the method is called
    "linear, causal": "linear",
    "convolution alone": "none",
    "bi-LSTM": "none",
    "bi-LSTM, stacked frames": "none",
    "LSH": "baselines.lsh",
}


class BiLstm(nn.Module):
    """The paper's baseline: a bidirectional LSTM with the front and the output of the others.

    Three quarters and a bit as wide as theirs, it has about as many parameters.
    """

    def __init__(self, config: TarnnConfig):
        super().__init__()
        width, layers = round(0.77 * config.hidden_size), config.num_hidden_layers
        self.front = TarnnForCTC(config).model.embed_tokens
        self.norm = nn.RMSNorm(config.hidden_size)  # as each block norms what it reads
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = nn.LSTM(
            config.hidden_size,
            width,
            layers,
            batch_first=True,
            bidirectional=True,
            dropout=config.dropout if layers > 1 else 0.0,
        )
        self.head = nn.Linear(2 * width, config.vocab_size)

    def forward(self, input_features: Tensor, attention_mask: Tensor, labels: Tensor) -> CausalLMOutput:
        """As `TarnnForCTC` has it; the blank is number 0."""
        places = self.front.num_positions(attention_mask.sum(-1))
        x = self.dropout(self.norm(self.front.read(input_features, attention_mask)[0]))
        packed = nn.utils.rnn.pack_padded_sequence(x, places, batch_first=True, enforce_sorted=False)
        logits = self.head(self.dropout(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]))
        loss = nn.functional.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1), labels[labels >= 0], places, (labels >= 0).sum(-1)
        )
        return CausalLMOutput(loss=loss, logits=logits)


def build(method: str, data: Data, seed: int, options: Any) -> nn.Module:
    """Make an untrained model: linear, softmax, LSH, the convolution alone, a causal model, or the bidirectional LSTM.

    Without attention, a wider feed-forward network takes the parameters of queries and keys.
    """
    torch.manual_seed(seed)
    keys: dict[str, Any] = {
        "vocab_size": len(data.symbols.names) + 1,
        "pad_token_id": 0,
        "input_size": data.train[0].frames.shape[1],
        "subsampling": data.subsampling,
        "front": "stack" if "stacked" in method else "conv",
        "conv_kernel": 15,
        "decay": "token",
        "position": "none",
        "dropout": 0.1,
        "hidden_size": options.hidden_size,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "attention": ATTENTION.get(method, method),
        "causal": "causal" in method,
    }
    if "LSTM" in method:
        return BiLstm(TarnnConfig(**keys))
    if method == "convolution alone":  # three matrices, so much wider, have as many numbers as W_q and W_k
        keys["intermediate_size"] = TarnnConfig(**keys).intermediate_size + 2 * options.hidden_size // 3
    return TarnnForCTC(TarnnConfig(**keys))
