"""The documentation site: its checks find what is wrong in a small site, and its pages hold what the code has."""

import importlib.util
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from support.code_blocks import PAGES

import tarnn
from scripts.site import check as checks
from scripts.site.api import api_pages, names_in_guides
from scripts.site.build import ROOT, digests
from scripts.site.command_line import command_line
from scripts.site.docstrings import as_rst
from scripts.site.formats import formats
from scripts.site.http_api import http_api
from scripts.site.pages import stage
from scripts.site.refusals import collected, refusals, sentences
from scripts.site.settings import settings
from scripts.site.text_copies import write_copies
from tarnn.cli.main import COMMANDS, function_of
from tarnn.serving.http.app import GROUPS
from tarnn.serving.http.openapi import Operation
from tarnn.tasks import TASKS

GOOD = """# Title

[next](more.md#a-part), [here](#title), [elsewhere](https://example.org/nothing), `[no](link.md)`

![a curve](curve.png)

```text
[no](link.md) ![](none.png)
```
"""
FAULTS = {
    "[x](none.md)": "index.md:3: there is no none.md.",
    "[x](more.md#nothing)": "index.md:3: more.md has no heading #nothing.",
    "[x](#nothing)": "index.md:3: index.md has no heading #nothing.",
    "[x](../outside.md)": "index.md:3: there is no ../outside.md.",
    "![](curve.png)": "index.md:3: the picture curve.png has no alternative text.",
    '<img src="curve.png">': "index.md:3: a picture has no alternative text.",
}
needs_sphinx = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("sphinx", "myst_parser", "furo"))),
    reason="Sphinx, MyST or furo is missing: pip install 'tarnn[docs]'",
)


@pytest.fixture
def small(tmp_path):
    """Two pages and a picture, all right."""
    folder = tmp_path / "pages"
    folder.mkdir()
    (tmp_path / "outside.md").write_text("# Outside\n")
    (folder / "index.md").write_text(GOOD)
    (folder / "more.md").write_text("# More\n\n## A part\n\n## `A` part\n\n[again](#a-part-1)\n")
    (folder / "curve.png").write_bytes(b"picture")
    return folder


def test_a_page_that_is_right(small):
    assert checks.check(small) == []


@pytest.mark.parametrize("wrong", FAULTS)
def test_a_fault_is_named_with_page_and_line(small, wrong):
    (small / "index.md").write_text(GOOD.replace("\n", f"\n\n{wrong}\n", 1))
    assert checks.check(small) == [FAULTS[wrong]]


def test_the_check_of_a_wrong_folder_ends_with_1(small):
    (small / "index.md").write_text("# Title\n\n[x](none.md)\n")
    script = Path(checks.__file__)
    run = subprocess.run([sys.executable, script, small], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (1, "index.md:3: there is no none.md.\n")


def test_a_heavy_page_is_named(tmp_path):
    (tmp_path / "a.html").write_text('<img alt="a curve" src="_images/curve.png">')
    (tmp_path / "_images").mkdir()
    (tmp_path / "_images/curve.png").write_bytes(bytes(checks.HEAVIEST - 100))
    assert checks.check_weight(tmp_path / "a.html", tmp_path) == []
    (tmp_path / "_images/curve.png").write_bytes(bytes(checks.HEAVIEST))
    [fault] = checks.check_weight(tmp_path / "a.html", tmp_path)
    assert fault.startswith("a.html:1: 300,043 bytes with its pictures, of 300,000.")


def test_a_public_name_without_documentation_is_named(tmp_path):
    source = tmp_path / "__init__.py"
    source.write_text("from a import (\n    b as b,\n    c as c,\n)\n")
    assert checks.check_api(["b", "c"], ["b"], source) == ["__init__.py:3: c is public, and not in the reference."]


def test_a_guide_that_is_not_listed_is_named(tmp_path):
    (tmp_path / "index.md").write_text("```{toctree}\nA title <docs/a>\ndocs/b\n```\n")
    faults = checks.check_listed(tmp_path / "index.md", ["docs/a", "docs/b", "docs/c", "docs"])
    assert [fault.split()[1] for fault in faults] == ["docs/c", "docs"]


def test_the_pages_of_this_repository(tmp_path):
    """Links, anchors and alternative texts; every guide has its place; pictures are small and opaque."""
    guides = stage(ROOT, tmp_path)
    assert [x for x in checks.check(tmp_path) if "there is no reference/" not in x] == []
    listed = [str(guide.relative_to(ROOT).with_suffix("")) for guide in guides]
    assert checks.check_listed(tmp_path / "index.md", listed) == []
    assert all(path.stat().st_size < 120_000 for path in tmp_path.rglob("*.png"))


def test_every_public_name_is_in_the_api():
    pages = api_pages(PAGES)
    assert all(f":: tarnn.{name}\n" in pages["tarnn"] + pages["tarnn.classes"] for name in tarnn.__all__)
    for room in ("ops", "attention", "feature_maps", "models", "parallel"):
        names = set(getattr(tarnn, room).__all__) - set(tarnn.__all__)
        assert all(f":: tarnn.{room}.{name}\n" in pages[f"tarnn.{room}"] for name in names)
    assert ":: tarnn.training.run.train\n" in pages["more"]


def test_names_that_guides_import(tmp_path):
    (tmp_path / "a.md").write_text(
        "```python\nfrom tarnn.a.b import c, d as e\nimport torch\n```\n\n```sh\nfrom\n```\n"
    )
    assert names_in_guides([tmp_path / "a.md"]) == {"tarnn.a.b": {"c", "d"}}


def test_every_command_and_option_is_in_its_page():
    page = command_line()
    for name in COMMANDS:
        section = page.split(f"\n## tarnn {name}\n")[1].split("\n## ")[0]
        function = function_of(name)
        app = typer.Typer(add_completion=False)
        app.command()(function)
        for parameter in typer.main.get_command(app).params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                assert f"`{parameter.opts[-1]}`" in section, (name, parameter.opts)
        assert set(inspect.signature(function).parameters) == set() or "| what it is |" in section


def test_every_setting_is_in_its_page():
    page = settings()
    for name, task in TASKS.items():
        section = (
            page.split(f"\n## {name}\n")[1].split("\n## ")[0] + page.split("\n## All tasks\n")[1].split("\n## ")[0]
        )
        assert all(f"| `{x.name}` |" in section for x in fields(task.settings_class)), name


def test_every_operation_and_schema_is_in_its_page():
    page = http_api()
    for operation in (route for group in GROUPS for route in group.routes if isinstance(route, Operation)):
        assert f"\n### {operation.method} {operation.template}\n\n{operation.summary}." in page
    assert set(re.findall(r"\]\(#(\w+)\)", page)) <= {x.lower() for x in re.findall(r"^### (\w+)$", page, re.M)}
    assert "| `max_tokens` | integer (≥ 0" in page


def test_formats_name_their_versions():
    from tarnn.data import tensor_file

    assert f"Format `{tensor_file.FORMAT}`, version {tensor_file.VERSION}." in formats()


def test_sentences_are_those_of_the_code(tmp_path):
    (tmp_path / "a.py").write_text(
        'def f(path, n):\n    warnings.warn(f"{path} is slow here, {n + 1} times.", X)\n'
        '    raise ValueError(f"expected a positive number, "\n                     f"got {self.count}.")\n'
        '    raise ValueError("short")\n    print("this is no refusal of anything")\n'
    )
    assert sorted(sentences(tmp_path / "a.py")) == [
        "expected a positive number, got ‹count›.", "‹path› is slow here, … times.",
    ]  # fmt: skip


def test_sentences_that_are_explained_are_in_the_code():
    """Each heading of docs/site/errors.md is a piece of a sentence, with … or ‹…› where a value stands."""
    explained = (ROOT / "docs/site/errors.md").read_text(encoding="utf-8")
    everything = [text for texts in collected().values() for text in texts]
    headings = re.findall(r"^### (.+)$", explained, re.M)
    assert len(headings) >= 15

    def is_said(heading: str) -> bool:
        pieces = [re.escape(x.replace("\\", "").strip()) for x in re.split("…|‹[^›]*›", heading) if x.strip()]
        return any(re.search(".*".join(pieces), text) for text in everything)

    assert [x for x in headings if not is_said(x)] == []
    assert refusals(explained).count("\n* ") > 500


DOCSTRING = """Compute o from x_:

    o = Σ_j φ(x) v_j

over all j. With `x | y` too.

Args:
    x, y: (b, t), numbers
        of two lines.
    z: more.

Raises ValueError.

>>> f(1)
2
"""


def test_docstrings_become_lists_and_formulas():
    text = "\n".join(as_rst(DOCSTRING.splitlines()))
    assert "::\n\n        o = Σ_j φ(x) v_j\n" in text
    assert "Compute o from x\\_:" in text
    assert "\\ ``x | y``\\  too." in text
    assert "**Args**\n\n\n- ``x, y``: (b, t), numbers\n  of two lines.\n\n- ``z``: more.\n" in text
    assert ">>> f(1)\n2\n" in text


def test_copies_for_programs(tmp_path):
    pages, site = tmp_path / "pages", tmp_path / "site"
    (pages / "reference").mkdir(parents=True)
    (pages / "index.md").write_text("# T\n\n```{toctree}\n:caption: Part\n:hidden:\nThe API <reference/api>\n```\n")
    (pages / "reference/api.md").write_text(
        "# API\n\nAll names. And more.\n\n```{eval-rst}\n.. autoclass:: a.B\n   :members:\n```\n"
    )
    api = {"a.B": {"signature": "(x)", "text": "Make B."}, "a.B.run": {"signature": "() -> int", "text": "Run."}}
    write_copies(pages, site, api)
    assert (site / "llms.txt").read_text() == "# T\n\n## Part\n\n* [API](reference/api.md): All names.\n"
    whole = (site / "llms-full.txt").read_text()
    assert "a.B(x)\n" in whole
    assert "Make B." in whole
    assert "a.B.run() -> int\n" in whole
    assert "eval-rst" not in whole


@needs_sphinx
@pytest.mark.slow
def test_sphinx_builds_a_small_site_twice_with_the_same_bytes(small, tmp_path):
    (small / "index.md").write_text(
        f"{GOOD}\n```{{toctree}}\nmore\n```\n\n```{{eval-rst}}\n.. autofunction:: tarnn.linear_attention\n\n"
        ".. autofunction:: tarnn.load\n```\n"
    )
    made = []
    for name in ("first", "second"):
        command = [
            sys.executable,
            "-m",
            "sphinx",
            "-q",
            "-W",
            "-c",
            ROOT / "scripts/site",
            "-d",
            tmp_path / f"{name}.trees",
        ]
        run = subprocess.run([*command, small, tmp_path / name], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        made.append(digests(tmp_path / name))
    assert made[0] == made[1]
    html = (tmp_path / "first/index.html").read_text()
    text = re.sub(r"<[^>]+>", "", html)
    assert "Float[Tensor, 'b h t d']" in re.sub(r"\s+", " ", text)
    assert 'id="tarnn.linear_attention"' in html
    assert "= silent," in text  # a default that is a function
    assert "~" not in text
    assert "0x" not in text
    assert checks.check(small, tmp_path / "first") == []
