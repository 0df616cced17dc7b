"""What fewer bits cost: the script runs on a tiny Llama, which it computes as transformers does."""

import gzip
import json

import byte_model
import fewer_bits
import pytest
import torch

from tarnn.kernels.cpu import library


@pytest.mark.filterwarnings("ignore")  # what transformers has to say of random configs
@pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")
def test_every_format_is_measured_on_the_model_itself(script, folder, tmp_path):
    theirs = byte_model.model_of(64, 2, 32).eval()
    theirs.save_pretrained(tmp_path / "model")
    ids = torch.randint(0, 256, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(fewer_bits.load(tmp_path / "model")(ids).logits, theirs(ids).logits)
    for name in byte_model.HELD_OUT:
        with gzip.open(tmp_path / f"{name}.txt.gz", "wb") as file:
            file.write(b"It is a truth universally acknowledged. " * 10)
    assert script("fewer_bits", "--quick", "--model", tmp_path / "model", "--books", tmp_path).code == 0
    found = json.loads((folder / "fewer_bits.json").read_text())["results"]
    bits = {name: x["bits_per_byte"] for name, x in found.items()}
    assert all(7 < x < 9 for x in bits.values())
    assert len(set(bits.values())) == 4
    sizes = [found[name]["bytes"] for name in ("int4", "int8", "bfloat16", "float32")]
    assert sizes == sorted(set(sizes))
