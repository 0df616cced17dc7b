"""What `serve.py` serves: a linear model, and a Llama of the same shape, with random weights and one tokenizer.

Each is a folder as `tarnn serve` and `transformers serve` open it. The tokenizer is a byte-level BPE whose alphabet is ASCII,
so that every token is whole characters: each token that a server writes is an event that a client sees. Heads are matrices of
their own, for a random model whose head is its embedding would repeat its last token. Nothing ends a text but its length.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tarnn.models import TarnnConfig, TarnnForCausalLM

ROOT = Path(__file__).parents[2]
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LONGEST = 2**18  # positions that a tokenizer and a Llama say they have


def corpus() -> Iterator[str]:
    """Plain English and Python: what this repository says of itself, the ASCII of it."""
    for pattern in ("*.md", "docs/**/*.md", "src/tarnn/**/*.py"):
        for file in sorted(ROOT.glob(pattern)):
            yield file.read_text().encode("ascii", "ignore").decode()


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with exactly that many tokens, roles of a conversation among them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=list(ROLES), show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    if backend.get_vocab_size() != vocab:
        raise ValueError(f"the corpus gives {backend.get_vocab_size()} tokens, not {vocab}: ask for fewer.")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=LONGEST, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_linear(folder: Path, options, tokenizer: PreTrainedTokenizerFast) -> TarnnForCausalLM:
    torch.manual_seed(0)
    model = TarnnForCausalLM(
        TarnnConfig(
            vocab_size=options.vocab,
            hidden_size=options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            tie_word_embeddings=False,
        )
    ).eval()
    model.save_pretrained(folder)
    _save_tokenizer(folder, tokenizer)
    return model


def save_llama(folder: Path, options, inner: int, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """inner: the width of the feed-forward's middle, that of the linear model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=options.vocab,
            hidden_size=options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            intermediate_size=inner,
            max_position_embeddings=LONGEST,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    model.save_pretrained(folder)
    _save_tokenizer(folder, tokenizer)
    return model


def _save_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """With the template in tokenizer_config.json too, where every reader looks."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}, indent=1))


def vocabulary(folder: Path) -> dict[str, list]:
    """Tokens in order, merges, and which tokens are no text: what a GGUF file says of a tokenizer."""
    data = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    special = {x["content"] for x in data["added_tokens"]}
    return {"tokens": tokens, "merges": merges, "special": [x in special for x in tokens]}
