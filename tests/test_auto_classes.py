"""A checkpoint loads in a fresh process that has imported tarnn, in whichever order, and nothing of tarnn's by name."""

import subprocess
import sys

import pytest
import torch

from tarnn.checkpoint_keys import MODEL_TYPES

ORDERS = {
    "tarnn first": "import tarnn, transformers",
    "transformers first": "import transformers, tarnn",
    "the mapping first": "from transformers import AutoConfig; import tarnn",
}
USES = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
import sys
text, images = sys.argv[1:]
print(type(AutoConfig.from_pretrained(text)).__name__)
print(type(AutoModelForCausalLM.from_pretrained(text)).__name__)
print(type(AutoModel.from_pretrained(text)).__name__)
print(type(AutoModel.from_pretrained(images)).__name__)
print(AutoTokenizer.from_pretrained(text)("ab").input_ids)
print(len(pipeline("text-generation", model=text)("ab", max_new_tokens=3, do_sample=False)))
print(AutoConfig.for_model("tarnn", hidden_size=64).hidden_size)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """As `tarnn train` leaves them: a model of bytes with its tokenizer, and a model of images."""
    from tarnn.data.tokenizers import byte_tokenizer
    from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnForImageGeneration, TarnnImageConfig

    text, images = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("images")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    TarnnForCausalLM(TarnnConfig(**sizes)).save_pretrained(text)
    byte_tokenizer().save_pretrained(text)
    config = TarnnImageConfig(**sizes, image_height=4, image_width=4)
    TarnnForImageGeneration(config).save_pretrained(images)
    return text, images


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_loading_in_a_fresh_process(folders, order):
    expected = "TarnnConfig TarnnForCausalLM TarnnModel TarnnForImageGeneration [97, 98] 1 64"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{ORDERS[order]}\n{USES}", *map(str, folders)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert " ".join(run.stdout.split()) == expected


CONVERTED = """
from transformers import AutoConfig, AutoModelForCausalLM
import sys, torch
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    print(model.config._attn_implementation, type(model.model.layers[0].self_attn.tarnn).__name__)
    print(*model(torch.arange(3, 33)[None]).logits[0, -1, :3].tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["tarnn first", "transformers first"])
def test_a_converted_model_in_a_fresh_process(order, tmp_path):
    """It runs the attention that it was converted to, without a word of transformers' about an unknown method."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tarnn.conversion import set_options

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    names, logits = ("tarnn_hybrid", "tarnn_linear"), []
    for name in names:
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=99)).eval()
        with torch.no_grad():
            for x in model.parameters():
                x.mul_(5)
        model.set_attn_implementation(name)
        set_options(model, window=4, sinks=1, far_bias=0.5)
        model.save_pretrained(tmp_path / name)
        logits += model(torch.arange(3, 33)[None]).logits[0, -1, :3].tolist()
    code = f"{ORDERS[order]}\n{CONVERTED}"
    folders = [str(tmp_path / name) for name in names]
    run = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "quantization" not in run.stderr
    words = run.stdout.split()
    assert words[::5] + words[1::5] == [*names, "LayerAttention", "LayerAttention"]
    assert [float(x) for i, x in enumerate(words) if i % 5 > 1] == pytest.approx(logits, abs=1e-4)


def test_a_stand_in_for_each_model():
    """What is registered by name is what the models register themselves."""
    from tarnn.huggingface import registered as models

    configs = {c for c in vars(models).values() if isinstance(c, type) and hasattr(c, "known_keys")}
    assert {c.model_type for c in configs} == set(MODEL_TYPES)


def test_other_models_are_left_alone():
    """transformers' own models load as ever, and tarnn's models are not imported for them."""
    code = (
        "import tarnn, sys; from transformers import AutoConfig; AutoConfig.for_model('llama'); "
        "import transformers.quantizers.auto; "
        "assert 'tarnn.models' not in sys.modules and 'tarnn.conversion' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
