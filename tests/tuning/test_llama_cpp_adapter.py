"""Adapters in llama.cpp: its converter takes each product to where it takes the base's weight, and it computes tarnn's logits.

LLAMA_CPP names the folder of its source (tested: 0c1e57098, after v0.5.0); the logits need the package llama-cpp-python too.
"""

import ctypes
import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from support.open_folders import SIZE, make_folder

import tarnn as package
from tarnn.families.adapter import CONFIG, read_adapter

PLACE = Path(os.environ.get("LLAMA_CPP", "/nowhere"))
SCRIPT = PLACE / "convert_lora_to_gguf.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not SCRIPT.is_file(), reason="LLAMA_CPP names no folder with convert_lora_to_gguf.py"),
]
RUN = (  # with equal logits; of the others llama.cpp refuses shapes as small as here, or fields of the base's config
    "Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3.5", "LFM2", "LFM2-8B-A1B", "Mamba", "Mamba-2", "Jamba-v0.1",
    "Nemotron-3-Nano-30B-A3B",
)  # fmt: skip
CONVERTED = (
    "Qwen3.5 with images", "Qwen3.5-35B-A3B", "Qwen3.5-MoE, text alone", "falcon-mamba-7b", "Bamba-9B", "Granite-4.0-h-tiny",
)  # fmt: skip
LORA = ["--lora", "3", "--length", "48", "--learning-rate", "1e-2", "--steps", "8"]
VALUES = {"Qwen3.5": {"linear_value_head_dim": 8, "head_dim": 64}}  # values as wide as keys, and heads of 32 or more
IDS = torch.randint(0, 256, (1, 30), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("family", [*RUN, *CONVERTED])
def test_products_and_logits(tarnn, chats, tmp_path, monkeypatch, family):
    for place in (PLACE, PLACE / "gguf-py"):
        monkeypatch.syspath_prepend(place)
    folder, adapter, plain, file = (tmp_path / x for x in ("model", "adapter", "base.gguf", "adapter.gguf"))
    make_folder(folder, family, scale=3, **VALUES.get(family, {}))
    if family.startswith("Qwen3.5"):  # released configs say that they have a layer for a second token: it is asked for
        fields = json.loads((folder / "config.json").read_text())
        fields.get("text_config", fields)["mtp_num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(fields))
    assert tarnn("finetune", folder, chats, "--out", adapter, *LORA)[0] == 0
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(adapter), "--base", str(folder), "--outfile", str(file)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    same_products(base := base_of(folder, plain), adapter, file)
    if family in RUN:
        llama = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
        base.write()
        model = llama.llama_model_load_from_file(str(plain).encode(), llama.llama_model_default_params())
        for given in (None, adapter):
            expected = package.load(folder, adapter=given).logits(IDS)[0]
            assert (logits_of(llama, model, given and file) - expected).abs().max() < 1e-5 * expected.abs().max()


def base_of(folder, out):
    """llama.cpp's converter of the base, without a tokenizer."""
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from gguf import LlamaFileType

    fields = ModelBase.load_hparams(folder, False)
    kind = get_model_class(get_model_architecture(fields, ModelType.TEXT))

    class Base(kind):
        model_arch, no_mtp = kind.model_arch, True

        def set_vocab(self):
            self.gguf_writer.add_tokenizer_model("no_vocab")
            self.gguf_writer.add_vocab_size(SIZE["vocab_size"])

    return Base(folder, LlamaFileType.ALL_F32, out, hparams=fields, eager=True)


def same_products(base, adapter, file):
    from gguf import GGUFReader

    reader, expected = GGUFReader(file), {}
    for module, x in read_adapter(adapter).items():
        product = x.b @ x.a
        assert product.any()
        name, _ = base.filter_tensors((f"{module}.weight", lambda product=product: product))
        layer = next(int(part) for part in name.split(".") if part.isdecimal())
        expected |= dict(base.modify_tensors(product, name, layer))
    found = {x.name: torch.from_numpy(x.data.copy()) for x in reader.tensors}
    assert found.keys() == {f"{name}.lora_{part}" for name in expected for part in "ab"}
    for name, x in expected.items():
        assert torch.allclose(found[f"{name}.lora_b"] @ found[f"{name}.lora_a"], x, rtol=1e-5, atol=1e-7)
    assert reader.fields["adapter.lora.alpha"].contents() == json.loads((adapter / CONFIG).read_text())["lora_alpha"]


def logits_of(llama, model, adapter):
    params, one = llama.llama_context_default_params(), (llama.llama_token * 1)()
    params.n_ctx, params.n_threads, params.flash_attn_type, params.type_k, params.type_v = 64, 1, 0, 0, 0
    context, rows = llama.llama_init_from_model(model, params), []
    if adapter is not None:
        read = (llama.llama_adapter_lora_p_ctypes * 1)(llama.llama_adapter_lora_init(model, str(adapter).encode()))
        assert llama.llama_set_adapters_lora(context, read, 1, (ctypes.c_float * 1)(1.0)) == 0
    for one[0] in IDS[0].tolist():
        assert llama.llama_decode(context, llama.llama_batch_get_one(one, 1)) == 0
        rows.append(torch.tensor(llama.llama_get_logits_ith(context, -1)[: SIZE["vocab_size"]]))
    llama.llama_free(context)
    return torch.stack(rows)
