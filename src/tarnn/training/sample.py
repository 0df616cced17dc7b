"""What the trained model writes, from nothing: the end of every run."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from tarnn.models import TarnnForCausalLM
from tarnn.training.folder import SAMPLE


def write_sample(folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int, tokens: int) -> str:
    """What the model in `folder` writes as a new document, at temperature 0.8; also in sample.txt."""
    if not tokens:
        return ""
    model = TarnnForCausalLM.from_pretrained(folder).eval()
    start = torch.tensor([[tokenizer.eos_token_id]])
    longest = model.config.max_position_embeddings or tokens + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = model.generate(
            start, attention_mask=torch.ones_like(start), do_sample=True, temperature=0.8, top_k=0,
            max_new_tokens=min(tokens, longest - 1),
        )  # fmt: skip
    text = str(tokenizer.decode(ids[0], skip_special_tokens=True))
    (folder / SAMPLE).write_text(text, encoding="utf-8")
    return text
