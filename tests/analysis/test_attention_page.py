"""The page about attention, in a real browser, with real keys and a real mouse; and what is in it."""

import base64
import json
import re

import numpy as np
import pytest
import torch
from support.served_page import CONTRASTS, OUTSIDE

from tarnn.analysis.attention_maps import attention_maps
from tarnn.analysis.attention_page import attention_page
from tarnn.models import TarnnConfig, TarnnForCausalLM

TOKENS = ["M", "K", "</script>", "a&b", "␣", "字", "V"]


@pytest.fixture(scope="module")
def maps():
    torch.manual_seed(0)
    config = TarnnConfig(
        vocab_size=11, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, initializer_range=0.5
    )
    model = TarnnForCausalLM(config).eval()
    return attention_maps(model, input_ids=torch.arange(7)[None], use_cache=False)


@pytest.fixture(scope="module")
def page(maps):
    return attention_page(maps, TOKENS, title="A <model>")


def embedded(page):
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_holds_the_weights_and_needs_nothing_else(page, maps):
    found = embedded(page)
    assert found["tokens"] == TOKENS
    for layer, one in zip(found["layers"], maps, strict=True):
        steps = np.frombuffer(base64.b64decode(layer["weights"]), np.uint8).reshape(4, 7, 7)
        weights = steps / 255 * np.array(layer["largest"])[:, None, None]
        assert np.abs(weights - one.weights()[0].numpy()).max() <= max(layer["largest"]) / 510 + 1e-6
    assert not re.search(r"""(src|href)\s*=|https?://|import\s|fetch\(|url\(""", page.replace(json.dumps(found), ""))


@pytest.fixture
def opened(browser, page, tmp_path):
    """The browser with the page in it, and what its status line should say of a layer, head and token."""
    path = tmp_path / "attention.html"
    path.write_text(page, encoding="utf-8")
    browser.open(f"file://{path}")
    yield browser
    assert not browser.complaints()


def status(browser):
    return browser.run("return document.getElementById('status').textContent")


def line(maps, layer, head, i, j=None):
    row = maps[layer].weights()[0, head, i]
    j = int(row.argmax()) if j is None else j
    what = f"head {head}: token {i} “{TOKENS[i]}” reads token {j} “{TOKENS[j]}” with weight "
    return f"{maps[layer].name}, {what}", float(row[j])


def check(browser, maps, *place):
    text, weight = line(maps, *place)
    found = status(browser)
    assert found.startswith(text), found
    assert float(found.removeprefix(text)) == pytest.approx(weight, abs=0.004)


def test_keys_choose_token_layer_and_head(opened, maps):
    assert opened.run("return document.title") == "A <model>"
    check(opened, maps, 0, 0, 6)
    opened.press("left", "left", "left", "left", "right")
    check(opened, maps, 0, 0, 3)
    opened.press("down", "]", "]")
    check(opened, maps, 1, 2, 3)
    opened.press("up", "[", "up", "up")
    check(opened, maps, 0, 1, 3)
    opened.press(*["right"] * 9)
    check(opened, maps, 0, 1, 6)
    assert opened.run("return location.hash") == "#layer=0&head=1&token=6"


def test_what_is_drawn_is_the_matrix(opened, maps):
    """A darker cell for a larger weight: the canvas is read back."""
    opened.press("down")
    shades = opened.run(
        "const c = $('map').getContext('2d'); return Array.from({length: 7}, (_, i) => Array.from({length: 7}, (_, j) => "
        "c.getImageData(place.left + (j + .5) * place.cell, place.top + (i + .5) * place.cell, 1, 1).data[0]))"
    )
    weights = maps[1].weights()[0, 0].numpy()
    darkness = 255 - np.array(shades)
    order = np.argsort(weights, axis=None)
    assert (np.diff(darkness.reshape(-1)[order]) >= -2).all()
    assert darkness.max() > 250


@pytest.fixture
def long_page(tmp_path):
    torch.manual_seed(0)
    config = TarnnConfig(vocab_size=100, hidden_size=24, num_hidden_layers=3, num_attention_heads=4)
    maps = attention_maps(TarnnForCausalLM(config).eval(), input_ids=torch.arange(100)[None], use_cache=False)
    path = tmp_path / "long.html"
    path.write_text(attention_page(maps, [f"t{i}" for i in range(100)], title="long"), encoding="utf-8")
    return f"file://{path}"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(390, 844), (800, 1000), (1280, 800)], ids=lambda x: str(x[0]))
def test_the_page_fits_and_its_facts_are_above_the_fold(browser, long_page, size, dark):
    browser.look(*size, dark=dark)
    browser.open(long_page)
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    for name in ("status", "reads", "read-by"):
        top = browser.run(f"return document.getElementById('{name}').getBoundingClientRect().top")
        assert 0 <= top < size[1] - 40, name
    assert browser.run(OUTSIDE) == []
    assert [(text, ratio) for text, ratio in browser.run(CONTRASTS) if ratio < 4.5] == []
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == dark
    empty = browser.run(
        "return [...$('map').getContext('2d').getImageData(place.left + 99 * place.cell, place.top, 1, 1).data]"
    )
    assert (sum(empty[:3]) < 200) == dark  # a token reads nothing of what comes after it


def test_shades_are_logarithmic_at_first(opened):
    assert opened.run("return document.getElementById('log').checked && state.log")
