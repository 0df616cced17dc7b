"""The model of images: a likelihood, whichever way it is run."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModel

from tarnn.models import TarnnForImageGeneration, TarnnImageConfig
from tarnn.models.images import START

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # the fast interface returns float32 parameters
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "image_height": 3,
    "image_width": 4,
    "num_mixtures": 3,
}
KINDS = {
    "grid": {},
    "paper": None,
    "colour": {"num_channels": 3, "image_height": 2, "image_width": 3},
    "classes": {"num_classes": 5, "num_channels": 3, "image_width": 2},
    "categorical": {"likelihood": "categorical", "decay": "none"},
    "rotary": {"position": "rotary", "decay": "none"},
    "learned": {"position": "learned"},
    "sinusoidal classes": {"position": "sinusoidal", "num_classes": 2},
    "softmax": {"attention": "softmax"},
    "hybrid": {"attention": ["linear", "softmax"]},
}


def build(kind="grid", **overrides):
    torch.manual_seed(0)
    choices = TINY | (KINDS[kind] or {}) | overrides
    config = TarnnImageConfig.paper(**choices) if kind == "paper" else TarnnImageConfig(**choices)
    return TarnnForImageGeneration(config).double().eval()


def draw(model, batch=3, seed=1):
    """Images, and class labels where the model has classes."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    shape = (batch, config.image_height, config.image_width, config.num_channels)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, config.num_classes, (batch,), generator=generator) if config.num_classes else None
    return pixels, labels


@pytest.fixture(params=list(KINDS))
def model(request):
    return build(request.param)


@torch.no_grad()
def test_step_by_step_is_parallel(model):
    """The parameters of each value's distribution: from whole images, value after value, and in pieces."""
    pixels, labels = draw(model)
    expected = model(pixels, labels).parameters.float()
    ids = torch.cat([torch.full((3, 1), START), pixels.flatten(1)[:, :-1].long()], dim=1)
    state = model.new_state(3, class_labels=labels)
    for i in range(ids.shape[1]):
        parameters, state = model.step(ids[:, i], state)
        assert parameters.dtype == torch.float32
        torch.testing.assert_close(parameters, expected[:, i], **CLOSE)
    for pieces in ([1, 4, 2], [7]):
        state, place = model.new_state(3, class_labels=labels), 0
        for n in pieces:
            parameters, state = model.prefill(ids[:, place : place + n], state)
            place += n
            torch.testing.assert_close(parameters, expected[:, place - 1], **CLOSE)
        parameters, state = model.step(ids[:, place], state)
        torch.testing.assert_close(parameters, expected[:, place], **CLOSE)
        assert state.position.tolist() == [8, 8, 8]


@torch.no_grad()
def test_loss_nats_and_bits(model):
    pixels, labels = draw(model)
    out, n = model(pixels, labels), model.config.sequence_length
    expected = -model.likelihood.log_prob(out.parameters, pixels.flatten(1).long())
    torch.testing.assert_close(out.nats, expected.sum(-1))
    torch.testing.assert_close(out.loss, expected.mean())
    torch.testing.assert_close(model.bits_per_dim(pixels, labels), expected.sum(-1) / n / math.log(2))
    alone = [model.bits_per_dim(pixels[i : i + 1], None if labels is None else labels[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(torch.cat(alone), model.bits_per_dim(pixels, labels))


@torch.no_grad()
def test_places_and_classes_matter():
    """Without them all values that follow the same values would be alike; each has its own row, column, channel."""
    model = build("colour", attention="none")  # knows nothing but the value before and the place
    pixels = torch.full((1, 2, 3, 3), 7, dtype=torch.uint8)
    parameters = model(pixels).parameters[0, 1:]
    assert len(parameters.unique(dim=0)) == 17
    model = build("classes")
    pixels, _ = draw(model, 1)
    every = [model(pixels, torch.tensor([c])).parameters for c in range(5)]
    assert all((every[0] != other).any(-1).all() for other in every[1:])


def test_gradients_reach_everything_and_training_helps(model):
    model = model.float().train()
    pixels, labels = draw(model)
    pixels[0], pixels[1] = 0, 255
    optimizer = torch.optim.RAdam(model.parameters(), lr=3e-3)
    first = None
    for _ in range(12):
        loss = model(pixels, labels).loss
        first = loss.item() if first is None else first
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert loss.item() < first


@pytest.mark.parametrize("kind", ["grid", "paper", "classes"])
def test_saved_and_loaded_by_name(kind, tmp_path):
    model = build(kind)
    model.save_pretrained(tmp_path)
    config, again = AutoConfig.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path).double().eval()
    assert (type(config), type(again)) == (TarnnImageConfig, TarnnForImageGeneration)
    assert all(getattr(config, key) == getattr(model.config, key) for key in config.known_keys())
    assert (config.image_height, config.max_position_embeddings) == (3, model.config.sequence_length)
    pixels, labels = draw(model)
    torch.testing.assert_close(again(pixels, labels).nats, model(pixels, labels).nats, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.compile
def test_the_step_compiles():
    model = build("classes", num_hidden_layers=1)
    pixels, labels = draw(model)
    compiled = torch.compile(model.step, fullgraph=True, backend="eager", dynamic=False)
    states = [model.new_state(3, class_labels=labels) for _ in range(2)]
    for i in range(3):
        ids = pixels.flatten(1)[:, i].long()
        (plain, states[0]), (fast, states[1]) = model.step(ids, states[0]), compiled(ids, states[1])
        torch.testing.assert_close(plain, fast)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"image_height": 0}, "image_height must be a positive integer; got 0"),
        ({"image_width": "28"}, "image_width must be a positive integer; got '28'"),
        ({"num_channels": 4}, r"num_channels must be 1 \(grey\) or 3 \(colour\); got 4"),
        ({"num_classes": -1}, "num_classes must be 0 or a positive integer; got -1"),
        ({"num_mixtures": 0}, "num_mixtures must be a positive integer"),
        ({"likelihood": "normal"}, "likelihood must be one of logistic_mixture, categorical; got 'normal'"),
        ({"vocab_size": 256}, "vocab_size of a model of images is 257, not 256; leave it out"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings of a model of images is False, not True"),
        ({"max_position_embeddings": 5}, "max_position_embeddings of a model of images is 784, not 5"),
        ({"position": "spiral"}, "position must be one of rotary, .*, none, grid; got 'spiral'"),
        ({"num_mixture": 5}, "TarnnImageConfig has no 'num_mixture'; it takes vocab_size, .*num_classes"),
        ({"model_type": "tarnn"}, "config of a 'tarnn' model, not of a tarnn_image model"),
    ],
)
def test_configs_that_make_no_sense(choices, message):
    with pytest.raises(ValueError, match=message):
        TarnnImageConfig(**choices)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("grid", lambda x: (x[:, :2], None), r"images are \(b, 3, 4, 1\): batch, height, .*; got \(3, 2, 4, 1\)"),
        ("grid", lambda x: (x[..., 0], None), r"got \(3, 3, 4\)"),
        ("grid", lambda x: (x[:0], None), r"got \(0, 3, 4, 1\)"),
        ("grid", lambda x: (x.float(), None), "integers from 0 to 255, best as uint8; got torch.float32"),
        ("grid", lambda x: (x.long() + 10, None), "must be from 0 to 255; got 26"),
        ("grid", lambda x: (x.long() - 300, None), "must be from 0 to 255; got -"),
        ("grid", lambda x: (x, torch.zeros(3).long()), "knows no classes"),
        ("classes", lambda x: (x, None), r"5 classes: it needs class_labels \(3,\); got none"),
        ("classes", lambda x: (x, torch.zeros(2).long()), r"class_labels \(3,\); got shape \(2,\)"),
        ("classes", lambda x: (x, torch.tensor([0, 5, 1])), "from 0 to 4; got 5"),
        ("classes", lambda x: (x, torch.tensor([0, -1, 1])), "from 0 to 4; got -1"),
    ],
)
@pytest.mark.refusals
def test_images_that_do_not_fit(kind, change, message):
    model = build(kind)
    with pytest.raises(ValueError, match=message):
        model(*change(draw(model)[0]))


@torch.no_grad()
def test_no_image_is_longer_than_an_image():
    model = build()
    state = model.new_state(2)
    _, state = model.prefill(torch.full((2, 12), START), state)
    with pytest.raises(ValueError, match=r"up to 12 tokens .*; got 13, 12 of them earlier"):
        model.step(torch.zeros(2).long(), state)
    with pytest.raises(ValueError, match=r"up to 12 tokens .*; got 13"):
        model.prefill(torch.full((2, 13), START), model.new_state(2))
