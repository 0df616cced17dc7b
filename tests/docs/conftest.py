"""A working folder with what the pages speak of."""

import json
import random
import shutil
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import transformers
from support.live_server import running
from transformers.utils import logging

import tarnn
from tarnn.cli.main import main
from tarnn.feature_maps.registry import MAPS
from tarnn.serving.engine import Engine
from tarnn.serving.http.app import create_app
from tarnn.serving.model import open_served
from tarnn.serving.store import StateStore

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
SMALL = ["--hidden-size", "32", "--layers", "2", "--heads", "2", "--steps", "4", "--batch-size", "2"]


def story(words: int, seed: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(["the cat ", "a hat ", "sat on ", "the mat.\n"]) for _ in range(words))


@pytest.fixture(scope="session")
def furnished(tmp_path_factory):
    """texts, a book, a trained model of text and one of images, a linear model of transformers: made once."""
    folder = tmp_path_factory.mktemp("furnished")
    (folder / "my-books").mkdir()
    for i in range(3):
        (folder / "my-books" / f"{i}.txt").write_text(story(400, i))
    (folder / "book.txt").write_text(story(100, 7))
    logging.disable_progress_bar()
    text = ["train", str(folder / "my-books"), "--out", str(folder / "runs/books"), "--sample-tokens", "0"]
    (folder / "digits").mkdir()
    for part, count in (("train", 30), ("test", 16)):
        pixels = np.random.default_rng(0).integers(0, 256, (count, 8, 8), np.uint8)
        np.savez(folder / "digits" / f"{part}.npz", images=pixels, labels=np.arange(count) % 10)
    images = [
        "train",
        str(folder / "digits"),
        "--task",
        "image",
        "--out",
        str(folder / "runs/digits"),
        "--sample-images",
        "0",
    ]
    for argv in (text, [*images, "--class-conditional"]):
        assert main([*argv, *SMALL]) == 0
    rows = ({"prompt": "the cat ", "completion": x} for x in ("sat.", "ran.", "lay down."))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_qwen(folder / "my-qwen3.5", tokenizer=folder / "runs/books")
    return folder


def save_qwen(folder, tokenizer):
    """A tiny Qwen3.5 with random weights that reads bytes."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    config = transformers.Qwen3_5TextConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=4, **heads, **linear, eos_token_id=None
    )
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


@pytest.fixture(scope="session")
def server(furnished):
    """The address of a server of that model of text, of the same with a chat template, "chat", and of the Qwen3.5, "qwen"."""
    shutil.copytree(furnished / "runs/books", chat := furnished / "runs/chat")
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(chat)
    with ExitStack() as stack:
        engines = {}
        for name, place in (("books", "runs/books"), ("chat", "runs/chat"), ("qwen", "my-qwen3.5")):
            model = open_served(furnished / place, name=name)
            engines[name] = stack.enter_context(Engine(model, store=StateStore(model)))
        yield stack.enter_context(running(create_app(engines)))


@pytest.fixture
def workplace(furnished, tmp_path, monkeypatch):
    """A copy of that folder, as the working folder; torch, its random numbers and the names of maps are left as they were."""
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    MAPS.names()
    maps = dict(MAPS)
    yield tmp_path
    tarnn.unpatch_transformers()
    MAPS.clear()
    MAPS.update(maps)
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
