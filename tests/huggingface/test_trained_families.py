"""Models of transformers that were trained with tarnn's ops go on without tarnn: the same text."""

import json
import subprocess
import sys

import pytest
import torch
from support.linear_families import FAMILIES
from transformers import AutoModelForCausalLM

import tarnn
from tarnn.ops.registration import Op

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NAMES = ["Qwen3-Next", "Mamba-2", "OLMo-hybrid"]
TEXT = "What a recurrent model has read is kept in a state of one size, and no page of it is ever turned back. "
GREEDY = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
FIRST = 3  # the id of a space; those before are special
OPEN = """
import json, sys, torch
from transformers import AutoModelForCausalLM

ids, options, folders = json.load(sys.stdin)
texts = []
for folder in folders:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    texts.append(model.generate(torch.tensor([ids]), **options)[0].tolist())
assert not [x for x in sys.modules if x.startswith("tarnn")]
print(json.dumps(texts))
"""


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([[ord(x) - ord(" ") + FIRST for x in text]])


def text_of(ids) -> str:
    return "".join(chr(x - FIRST + ord(" ")) for x in ids)


def trained(name: str):
    """A dense model of the family that has learned the text by heart."""
    torch.manual_seed(0)
    config = FAMILIES[name]()
    if name == "Qwen3-Next":
        config.mlp_only_layers = [0, 1]  # no experts
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    pages = ids_of(TEXT * 3)[0].unfold(0, 100, 1)
    for _ in range(150):
        rows = pages[torch.randint(len(pages), (4,))]
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_they_write_the_same_without_tarnn(tmp_path, monkeypatch):
    called, run = set(), Op.__call__
    monkeypatch.setattr(Op, "__call__", lambda op, *args, **options: called.add(op.name) or run(op, *args, **options))
    prompt, expected = ids_of(TEXT[:30]), TEXT[:90]
    folders, texts = [str(tmp_path / name) for name in NAMES], []
    with tarnn.patch_transformers():
        for name, folder in zip(NAMES, folders):
            model = trained(name)
            texts.append(model.generate(prompt, **GREEDY)[0].tolist())
            model.save_pretrained(folder)
    assert [text_of(x) for x in texts] == [expected] * 3
    assert {"delta", "convolution", "linear"} <= called
    given = json.dumps([prompt[0].tolist(), GREEDY, folders])
    alone = subprocess.run([sys.executable, "-c", OPEN], input=given, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    assert json.loads(alone.stdout) == texts
