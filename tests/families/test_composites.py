"""Models of images and text: their text model opens as by itself, and images are refused."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from support.open_folders import CONFIGS, DELTA, FILTERS, HEADS, IMAGES, byte_level

import tarnn
from tarnn.errors import UserError
from tarnn.families.by_name import open_program
from tarnn.families.composites import COMPOSITES
from tarnn.program.definition import new_states, run

SEES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
LFM3 = HEADS | {"layer_types": ["conv", "sliding_attention"], "sliding_window": 5, "conv_L_cache": 3}
TEXTS = {
    "lfm2": (FILTERS, SEES | {"num_patches": 16, "model_type": "siglip2_vision_model"}, {"projector_hidden_size": 16}),
    "lfm3": (LFM3, IMAGES, {"projector_hidden_size": 16}),
    "qwen3_5_text": (HEADS | DELTA, SEES | {"image_size": 28}, {"insert_layer_id": 0}),
}
HAS = [x for x in COMPOSITES if x in hf.models.auto.configuration_auto.CONFIG_MAPPING]


def made(kind):
    text, vision, more = TEXTS[COMPOSITES[kind].text]
    text = text | {"model_type": COMPOSITES[kind].text}
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(kind, text_config=text, vision_config=vision, image_token_id=7, **more)
    model = hf.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            x *= 8 if x.ndim > 1 else 1
    return model


@pytest.fixture(scope="module", params=HAS)
def model(request):
    return made(request.param)


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    return tmp_path


def changed(folder, change):
    fields = json.loads((folder / "config.json").read_text())
    change(fields)
    (folder / "config.json").write_text(json.dumps(fields))


@torch.no_grad()
def test_logits(model, folder):
    program, ids = open_program(folder), torch.arange(20, 66).view(2, 23)
    states = new_states(program, 2, dtype=torch.float64)
    logits, expected = run(program, ids, states, positions=[0, 0], dtype=torch.float64)[0], model(input_ids=ids).logits
    double = model.double()(input_ids=ids).logits
    model.float()
    assert (logits - double).abs().max() <= 2 * (expected - double).abs().max()
    assert expected.std() > 0.2


def test_images_are_refused(model, folder):
    lm, kind = tarnn.load(folder), model.config.model_type
    wanted = rf"token 7 stands for an image \(image_token_id\), and only the text model of this {kind}"
    for read in (lm.read, lambda x: lm.logits([x]), lambda x: lm.generate(x, max_new_tokens=1)):
        with pytest.raises(UserError, match=wanted):
            read([20, 7, 21])
        read([20, 21])


def test_keys_and_tensors_of_others_are_refused(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.extra.weight": torch.ones(2)}, file)
    with pytest.raises(UserError, match=r"weights that its config does not call for: model\.extra\.weight"):
        open_program(folder)
    save_file(tensors, file)
    changed(folder, lambda x: x["text_config"].update(logit_scale=0.5))
    with pytest.raises(UserError, match=r"text_config: logit_scale = 0.5 is not known"):
        open_program(folder)
    changed(folder, lambda x: x["text_config"].pop("logit_scale") and x.update(scale_of_all=3))
    with pytest.raises(UserError, match=r"config.json: scale_of_all = 3 is not known"):
        open_program(folder)
    changed(folder, lambda x: x.pop("scale_of_all") and x["text_config"].update(model_type="llama"))
    with pytest.raises(UserError, match="model_type must be"):
        open_program(folder)
    changed(folder, lambda x: x.update(text_config=None))
    with pytest.raises(UserError, match="text_config must be the config of a text model"):
        open_program(folder)


def test_messages_name_tensors_as_the_folder_does(folder):
    file = folder / "model.safetensors"
    name = "model.language_model.embed_tokens.weight"
    save_file({x: y for x, y in load_file(file).items() if x != name}, file)
    with pytest.raises(UserError, match=f"lacks the weights {name}"):
        open_program(folder)


def test_a_live_model_with_images(tmp_path):
    """It opens as its folder does; a module of its images that was changed is refused."""
    torch.manual_seed(0)
    model = hf.AutoModelForImageTextToText.from_config(CONFIGS["Qwen3.5 with images"]()).eval()
    model.save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    ids = torch.arange(20, 29)[None]
    assert torch.equal(tarnn.load(model).logits(ids), tarnn.load(tmp_path).logits(ids))
    act = model.model.visual.blocks[0].mlp.act_fn
    act.act = torch.nn.functional.gelu
    with pytest.raises(UserError, match=r"act_fn .* has another act than its config says"):
        tarnn.load(model)
