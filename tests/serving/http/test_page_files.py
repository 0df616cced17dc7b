"""The page's files: each is served, names no other place, and holds nothing that its policy forbids."""

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tarnn.serving.http import page
from tarnn.serving.http.app import create_app
from tarnn.serving.http.settings import ServerSettings

ROOT = Path(__file__).parents[3]
TEXTS = {file.name: file.read_text(encoding="utf-8") for file in page.FOLDER.iterdir()}


@pytest.fixture(scope="module")
def client():
    return TestClient(Starlette(routes=page.routes))


def test_all_files_are_served_under_the_policy(client):
    assert set(page.PATHS.values()) == TEXTS.keys()
    for path, name in page.PATHS.items():
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.text == TEXTS[name]
        assert answer.headers["content-type"] == f"{page.KINDS[Path(name).suffix]}; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.split(maxsplit=1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert client.get("/page/index.html").status_code == 404


def test_nothing_else_is_named_and_nothing_is_inline():
    assert not any(re.search(r"(https?:)?//\w", re.sub(r"^\s*//.*|\s// .*", "", x, flags=re.M)) for x in TEXTS.values())
    html = TEXTS["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
    named = set(re.findall(r'(?:src|href)="([^"]*)"', html)) | set(re.findall(r'from "\./([^"]*)"', TEXTS["main.js"]))
    assert named == {"data:,", "openapi.json", "page/look.css", "page/main.js", "server.js"}


def test_elements_that_the_script_uses_are_there_and_inputs_have_labels():
    ids = re.findall(r'\sid="([^"]+)"', TEXTS["index.html"])
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'\$\("([^"]+)"\)', TEXTS["main.js"]))
    assert used > {"text", "new", "copy"}
    assert used <= set(ids)
    labelled = set(re.findall(r'<label for="([^"]+)"', TEXTS["index.html"]))
    labelled |= set(re.findall(r'<label[^>]*>[^<]*<(?:input|select) id="([^"]+)"', TEXTS["index.html"]))
    assert set(re.findall(r'<(?:input|select|textarea) id="([^"]+)"', TEXTS["index.html"])) == labelled


def test_they_travel_with_the_source():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"]
    for name in TEXTS:
        path = f"/{(page.FOLDER / name).relative_to(ROOT)}"
        assert any(fnmatch.fnmatch(path, pattern) for pattern in build["sdist"]["include"]), name


def test_models_say_what_the_empty_page_tells(http, served_folder):
    weights = load_file(served_folder("linear") / "model.safetensors")
    [model] = http.get("/v1/models").json()["data"]
    assert model["parameters"] == sum(x.numel() for x in weights.values())


def test_the_page_needs_no_key():
    """It holds nothing of anybody; what it asks then needs one."""
    client = TestClient(create_app({}, ServerSettings(keys=("sesame",))))
    assert all(client.get(path).status_code == 200 for path in page.PATHS)
    assert client.get("/v1/models").status_code == 401
