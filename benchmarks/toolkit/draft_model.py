"""A small model of Qwen3.5's shape over bytes, trained with a head that expects the byte after next, for `drafts.py`."""

import gzip
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

import tarnn

BATCH, LENGTH = 8, 128
WEIGHT = 0.3  # of the head's loss
RATE, WARM = 2e-3, 40
SAVED_EVERY = 30  # seconds
HELD_OUT = 20_000  # bytes of the last book


def books(folder: Path) -> tuple[Tensor, Tensor]:
    """Bytes to train on, and those held out: of the books of a folder, or of a text made here where there is none."""
    texts = [gzip.decompress(path.read_bytes()) for path in sorted(folder.glob("*.txt.gz"))] or [made_text()]
    text = torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)
    return text[:-HELD_OUT], text[-HELD_OUT:]


def made_text() -> bytes:
    words = ["the", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "then", "it", "was", "there"]
    drawn = torch.randint(len(words), (40_000,), generator=torch.Generator().manual_seed(0))
    return " ".join(words[i] for i in drawn).encode()


class Head(nn.Module):
    """The layer of `mtp.`: its names, and what it computes of a model's hidden rows and the bytes after them."""

    def __init__(self, config: Any):
        super().__init__()
        n, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (Qwen3_5RMSNorm(n, eps) for _ in range(3))
        self.fc = nn.Linear(2 * n, n, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])

    def forward(self, model: Any, hidden: Tensor, following: Tensor) -> Tensor:
        embedded = self.pre_fc_norm_embedding(model.get_input_embeddings()(following))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden)], -1))
        turns = model.model.rotary_emb(x, torch.arange(x.shape[1])[None])
        return model.lm_head(self.norm(self.layers[0](x, position_embeddings=turns, attention_mask=None)))


def new_model(size: int, layers: int) -> tuple[Any, Head]:
    """The model and its head, with random weights."""
    torch.manual_seed(0)
    config = hf.Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=layers,
        num_attention_heads=size // 64,
        num_key_value_heads=size // 64,
        head_dim=64,
        linear_num_key_heads=size // 64,
        linear_num_value_heads=size // 64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        tie_word_embeddings=True,
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
    )
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    head = Head(model.config)
    for x in head.modules():
        if isinstance(x, nn.Linear):
            nn.init.normal_(x.weight, std=config.initializer_range)
    return model, head


def losses(model: Any, head: Head, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Nats a byte: of the next one by the model, of the one after it by the head."""
    hidden = model.model(ids[:, :-2]).last_hidden_state
    first, second = model.lm_head(hidden), head(model, hidden, ids[:, 1:-1])
    return cross_entropy(first.mT, ids[:, 1:-1]), cross_entropy(second.mT, ids[:, 2:])


def trained(folder: Path, text: Tensor, size: int, layers: int, steps: int, say: Callable[[str], None]) -> Path:
    """Return the folder of a trained model in the layout of Hugging Face; what was begun there goes on."""
    done, begun = folder / "model", folder / f"{steps}.pt"
    if (done / "model.safetensors").exists():
        return done
    folder.mkdir(parents=True, exist_ok=True)
    model, head = new_model(size, layers)
    both = nn.ModuleList([model, head])
    optimizer = torch.optim.AdamW(both.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.05)
    first = 0
    if begun.exists():
        kept = torch.load(begun)
        both.load_state_dict(kept["weights"])
        optimizer.load_state_dict(kept["optimizer"])
        first = kept["step"]
    saved = time.monotonic()
    with torch.enable_grad(), tarnn.patch_transformers():
        for step in range(first, steps):
            generator = torch.Generator().manual_seed(step)
            begins = torch.randint(len(text) - LENGTH - 2, (BATCH, 1), generator=generator)
            ids = text[begins + torch.arange(LENGTH + 2)].long()
            rate = RATE * min(1, (step + 1) / WARM) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = rate
            next_one, after = losses(model, head, ids)
            optimizer.zero_grad()
            (next_one + WEIGHT * after).backward()
            nn.utils.clip_grad_norm_(both.parameters(), 1.0)
            optimizer.step()
            if step % 50 == 0:
                say(f"step {step:5}: {next_one / math.log(2):.3f} bits a byte, the one after {after / math.log(2):.3f}")
            if time.monotonic() > saved + SAVED_EVERY:
                saved, partial = time.monotonic(), begun.with_suffix(".partial")
                torch.save(
                    {"weights": both.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, partial
                )
                partial.replace(begun)
    save(model, head, done)
    return done


def save(model: Any, head: Head, folder: Path) -> None:
    partial = folder.with_suffix(".partial")
    model.save_pretrained(partial)
    file = partial / "model.safetensors"
    save_file(load_file(file) | {f"mtp.{name}": x.contiguous() for name, x in head.state_dict().items()}, file)
    partial.replace(folder)
