"""`tarnn export --format web`: a folder of files whose pages run in a browser, with keys, in any width, in light and dark."""

import functools
import http.server
import json
import threading

import pytest
import torch
from support import javascript as js
from support.exported import save_run
from support.served_page import CONTRASTS, NAMELESS, OUTSIDE, wait

from tarnn.cli.main import main
from tarnn.errors import UserError
from tarnn.export import web
from tarnn.export.formats import export
from tarnn.kernels.cpu import library
from tarnn.models import TarnnForImageGeneration, TarnnImageConfig

pytestmark = [
    pytest.mark.skipif(not library.available(), reason="the compiled kernels can't be used"),
    pytest.mark.skipif(not js.is_there(), reason=js.MISSING),
]
SHARED = {"about.json", "model.tarnn", "page.css", "page.js", "tarnn.js", "tarnn.wasm"}
WIDTHS = (360, 800, 1280)
PAGES = (("text", "index.html"), ("text", "fork.html"), ("images", "index.html"))


def save_images(folder, **config):
    torch.manual_seed(0)
    fields = {
        "image_height": 6,
        "image_width": 5,
        "likelihood": "categorical",
        "hidden_size": 32,
        "num_hidden_layers": 2,
    }
    TarnnForImageGeneration(TarnnImageConfig(**{**fields, "num_attention_heads": 2, **config})).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """A text's and an image's, beside each other."""
    folder = tmp_path_factory.mktemp("sites")
    save_run(folder / "run", eos_token_id=None)
    save_images(folder / "pixels")
    for source, name in (("run", "text"), ("pixels", "images")):
        (folder / name).mkdir()
        export("web", folder / source, folder / name, {}, print)
    return folder


@pytest.fixture(scope="module")
def address(sites):
    """A server of files, as any host is."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *message):
            pass

        def end_headers(self):
            self.send_header("Cache-Control", "no-store")
            super().end_headers()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(sites)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def browser(browser, address):
    browser.open("about:blank")
    browser.requests(), browser.complaints()
    yield browser
    asked = [url for url in browser.requests() if not url.startswith(("data:", "blob:", "chrome"))]
    assert all(url.startswith(address) for url in asked), asked
    assert not browser.complaints()


def ready(browser, url):
    browser.open(url)
    wait(lambda: browser.run("return !document.querySelector('button.first').disabled"))


def text(browser, what):
    return browser.run(f"return document.getElementById('{what}').textContent")


def test_the_command_and_the_folder(tmp_path, sites, capfd):
    """Files alone; the page's facts; to be had by one command."""
    assert (
        main(["export", str(sites / "run"), "--format", "web", "--weights", "int4", "--out", str(tmp_path / "site")])
        == 0
    )
    assert capfd.readouterr().out.startswith(f"{tmp_path}/site: ")
    assert {x.name for x in (tmp_path / "site").iterdir()} == SHARED | {"index.html", "fork.html"}
    assert {x.name for x in (sites / "images").iterdir()} == SHARED | {"index.html"}
    about = json.loads((tmp_path / "site/about.json").read_text())
    assert (about["weights"], about["image"], about["key_bytes"]) == ("int4", None, 2 * 3 * 32 * 4)
    assert about["bytes"] == (tmp_path / "site/model.tarnn").stat().st_size
    image = json.loads((sites / "images/about.json").read_text())["image"]
    assert image == {"height": 6, "width": 5, "start_token": 256}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_classes": 3}, "draws images of given classes"),
        ({"likelihood": "logistic_mixture"}, "likelihood='logistic_mixture'"),
        ({"num_channels": 3}, "has 3 channels"),
    ],
)
def test_images_that_the_page_does_not_draw(tmp_path, config, words):
    with pytest.raises(UserError, match=words):
        export("web", save_images(tmp_path / "pixels", **config), tmp_path, {}, print)


def test_tokenizers_that_the_page_does_not_read(tmp_path):
    from tokenizers import normalizers

    from tarnn.data.tokenizers import byte_tokenizer

    save_run(tmp_path / "run")
    for words, change in (
        ("the added token <think>", lambda x: x.add_tokens(["<think>"])),
        ("normalizer NFC", lambda x: setattr(x.backend_tokenizer, "normalizer", normalizers.NFC())),
    ):
        tokenizer = byte_tokenizer()
        change(tokenizer)
        tokenizer.save_pretrained(tmp_path / "run")
        with pytest.raises(UserError, match=words):
            export("web", tmp_path / "run", tmp_path, {}, print)


def test_what_can_not_be_written(tmp_path, sites, monkeypatch):
    with pytest.raises(UserError, match=r"holds no model|no config|config\.json"):
        export("web", tmp_path, tmp_path, {}, print)
    monkeypatch.setattr(web, "MOST", 1000)
    (tmp_path / "large").mkdir()
    with pytest.raises(UserError, match="a browser takes at most 1,000"):
        export("web", sites / "run", tmp_path / "large", {}, print)
    monkeypatch.setattr(web, "RUNTIME", "missing.wasm")
    with pytest.raises(UserError, match=r"built without missing\.wasm"):
        export("web", sites / "run", tmp_path, {}, print)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("site", PAGES, ids=" ".join)
def test_every_width_in_light_and_dark(browser, address, site, dark):
    """Nothing stands out of the window, all text is readable, all that can be pressed has a name."""
    for width in WIDTHS:
        browser.look(width, 800, dark=dark)
        ready(browser, f"{address}/{'/'.join(site)}")
        if site[0] == "text":
            browser.run("document.querySelector('button.first').click()")
            wait(lambda: len(browser.run("return document.querySelector('.text')?.textContent ?? ''")) > 40)
        assert browser.run(OUTSIDE) == []
        assert [x for x in browser.run(CONTRASTS) if x[1] < 4.5] == []
        assert browser.run(NAMELESS) == []
        assert browser.run("return getComputedStyle(document.body).backgroundColor") == (
            "rgb(22, 24, 29)" if dark else "rgb(255, 255, 255)"
        )


def test_a_text_goes_on_beside_what_a_cache_would_be(browser, address, sites):
    """By keys alone; it stops, is kept, and goes on from what was kept."""
    browser.look(1280, 900)
    ready(browser, f"{address}/text/index.html")
    browser.run("document.getElementById('prompt').focus()")
    browser.press("enter")
    wait(lambda: int(text(browser, "count").replace(",", "")) > 3000)
    browser.press("enter")  # stops
    wait(lambda: text(browser, "write") == "Go on")
    key_bytes, ours = json.loads((sites / "text/about.json").read_text())["key_bytes"], text(browser, "ours")
    count = int(text(browser, "count").replace(",", ""))
    assert text(browser, "theirs") == browser.run(
        f"return import('./page.js').then(({{ size }}) => size({count * key_bytes}))"
    )
    assert len(text(browser, "text")) <= 3000
    browser.run("""
        window.kept = null;
        const url = URL.createObjectURL;
        URL.createObjectURL = (blob) => ((window.kept = blob), url(blob));
        document.getElementById('keep').click()""")
    browser.run("""
        const files = new DataTransfer(), input = document.getElementById('kept');
        files.items.add(new File([window.kept], 'text.state'));
        input.files = files.files, input.dispatchEvent(new Event('change'))""")
    wait(lambda: "is open" in text(browser, "about"))
    assert f"{count:,} tokens" in text(browser, "about")
    browser.run("document.getElementById('prompt').focus()")
    browser.press("enter")
    wait(lambda: int(text(browser, "count").replace(",", "")) > count + 500)
    assert text(browser, "ours") == ours
    browser.press("enter")
    wait(lambda: text(browser, "write") == "Go on")
    browser.run("""
        const files = new DataTransfer(), input = document.getElementById('kept');
        files.items.add(new File(['none'], 'text.state'));
        input.files = files.files, input.dispatchEvent(new Event('change'))""")
    wait(lambda: text(browser, "about") == "these bytes are no saved state.")


def test_a_prompt_is_read_once_and_forked(browser, address):
    browser.look(1280, 900)
    ready(browser, f"{address}/text/fork.html")
    browser.run("document.getElementById('prompt').focus()")
    browser.press("enter")
    forks = "return [...document.querySelectorAll('#forks .text')].map(x => x.textContent)"
    texts = wait(lambda: (x := browser.run(forks)) and len(x) == 3 and min(map(len, x)) > 100 and x)
    assert len({*texts}) == 3
    assert all(x.startswith("Call me") for x in texts)
    assert text(browser, "tokens") == "7 tokens"
    browser.press("tab", "tab", "enter")  # past the button that reads, to the one that forks
    wait(lambda: (x := browser.run(forks)) and len(x) == 4 and len(x[3]) > 100)
    assert browser.run("return document.activeElement.id") == "more"


def test_a_picture_beside_its_state(browser, address):
    browser.look(1280, 900)
    ready(browser, f"{address}/images/index.html")
    wait(lambda: browser.run("return document.querySelectorAll('#gallery canvas').length") >= 2)
    colours = "const c = document.getElementById('{}');"
    colours += "return [...new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data)].length"
    assert browser.run(colours.format("state")) > 20
    assert browser.run("const c = document.querySelector('#gallery canvas'); return [c.width, c.height]") == [5, 6]
    browser.run("document.getElementById('draw').focus()")
    browser.press("enter")
    wait(lambda: text(browser, "draw") == "Go on")
    before = (text(browser, "progress"), browser.run("return document.querySelectorAll('#gallery canvas').length"))
    browser.run("return new Promise(resolve => setTimeout(resolve, 300))")
    assert before[1] == browser.run("return document.querySelectorAll('#gallery canvas').length")


def test_a_page_says_why_it_can_not_run(browser, address, sites):
    page = (sites / "text/index.html").read_text()
    (sites / "text/narrow.html").write_text(
        page.replace("<head>", "<head><script>WebAssembly.validate = () => false</script>")
    )
    browser.open(f"{address}/text/narrow.html")
    wait(lambda: "has no SIMD" in text(browser, "trouble"))
    (sites / "text/narrow.html").unlink()
    whole = (sites / "text/model.tarnn").read_bytes()
    (sites / "text/model.tarnn").write_bytes(whole.replace(b'"format_version": "2"', b'"format_version": "9"'))
    browser.open(f"{address}/text/index.html?newer")
    wait(lambda: "has version 9 of packed files" in text(browser, "trouble"))
    (sites / "text/model.tarnn").write_bytes(whole)
    assert browser.run("return document.querySelector('button.first').disabled")
