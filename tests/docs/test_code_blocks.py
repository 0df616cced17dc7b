"""Every code block of README and docs runs as a reader would run it: pasted, alone, into a fresh Python or shell.

A Python block gets a namespace of its own. A command of `tarnn` is run as it stands, but for a training that is cut
short (`SHORT`). Both find a working folder with what the pages speak of: texts, a trained model of text and one of
images, a book, a folder of digits (see `conftest.py`). What asks a server asks one with these models.
"""

import os
import re
import shutil
import subprocess
import tomllib

import httpx
import openai
import pytest
import yaml
from support.code_blocks import NOT_RUN, PAGES, ROOT, Block, blocks, commands, unfenced_code

import tarnn
from tarnn.cli.main import build_app, main

SHORT = ["--steps", "2", "--layers", "1", "--hidden-size", "32", "--heads", "2", "--batch-size", "2"]
SERVER = "http://127.0.0.1:8000"  # as pages call it; here it has another port
C_BEFORE = """#include <stdio.h>
#include "tarnn.h"
int page(const int64_t* ids, int64_t count, int64_t next, float* logits) {
"""
OWN_LENGTH = {"--steps", "--max-minutes", "--epochs"}
# what peft says of names that transformers is about to change
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
ALL = [block for page in PAGES for block in blocks(page)]


EACH_COMMIT = {"README.md", "cookbook.md"}  # the other pages are read each night


def named(language: str) -> list:
    night = {page: () if page.name in EACH_COMMIT else pytest.mark.slow for page in PAGES}
    return [pytest.param(x, id=x.place, marks=night[x.page]) for x in ALL if x.language == language]


@pytest.mark.parametrize("block", named("python"))
def test_python_runs_as_pasted(block: Block, workplace, request):
    text, names = block.text, {"__name__": "__main__"}
    if SERVER in text:
        text = text.replace(SERVER, request.getfixturevalue("server"))
    if '"adapter"' in text:
        assert main(["finetune", "my-qwen3.5", "prompts.jsonl", "--out", "adapter", "--steps", "2"]) == 0
    exec(compile("\n" * block.line + text, str(block.page), "exec"), names)
    for client in (x for x in names.values() if isinstance(x, httpx.Client | openai.OpenAI)):
        client.close()  # as the end of a reader's Python does


@pytest.mark.parametrize("block", named("sh"))
def test_commands_run_as_pasted(block: Block, workplace, capfd, request):
    for words in commands(block):
        line = " ".join(words)
        if words[0] == "curl":
            asked = [word.replace(SERVER, request.getfixturevalue("server")) for word in words]
            subprocess.run([*asked, "--silent", "--show-error", "--fail-with-body"], check=True)
            continue
        if words[:2] == ["tarnn", "serve"]:  # it would run until it is stopped
            build_app().commands["serve"].make_context("serve", words[2:])
            continue
        if line.startswith(NOT_RUN):
            check_script(words)
            continue
        if "--format web" in line and not (ROOT / "src/tarnn/export/pages/tarnn.wasm").is_file():
            pytest.skip("tarnn.wasm was not built (make wasm)")
        assert words[0] == "tarnn", f"{block.place}: what is {line!r}? Add it to NOT_RUN, or write a tarnn command."
        argv = shortened(words[1:]) if words[1:2] == ["train"] else words[1:]
        assert main(argv) == 0, (line, capfd.readouterr().err[-2000:])


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("block", [pytest.param(x, id=x.place) for x in ALL if x.language == "c"])
def test_c_agrees_with_the_header(block: Block, tmp_path):
    """As a function's body, with the names that the page's text explains as its parameters."""
    source = tmp_path / "page.c"
    source.write_text(f"{C_BEFORE}{block.text}return 0; }}\n")
    env = {name: x for name, x in os.environ.items() if name != "LD_PRELOAD"}  # sanitizers are not for the compiler
    command = ["cc", "-fsyntax-only", "-Wall", "-Werror", "-iquote", ROOT / "csrc/runtime", source]
    assert subprocess.run(command, check=False, capture_output=True, text=True, env=env).stderr == ""


def shortened(argv: list[str]) -> list[str]:
    """The command with less work in it: a later option wins over an earlier one."""
    drop, kept = False, []
    for word in argv:
        if not drop and word not in OWN_LENGTH:
            kept.append(word)
        drop = not drop and word in OWN_LENGTH
    return [*kept, *SHORT] if "--resume" in kept else [*kept, *SHORT, "--overwrite"]


def check_script(words: list[str]) -> None:
    """A script that a page names is there."""
    if words[0] == "python":
        assert (ROOT / words[1]).is_file(), words[1]


def test_no_code_escapes():
    """Code stands in fences that say their language, so that it is run."""
    languages = {block.language for page in PAGES for block in blocks(page)}
    assert languages <= {"python", "sh", "c", "javascript", "text", "json"}
    assert {page.name: code for page in PAGES if (code := unfenced_code(page))} == {}


NOTES = sorted((ROOT / "docs/decisions").glob("20*.md"))
LINKED = [
    *PAGES,
    *sorted(ROOT.glob("*/README.md")),
    ROOT / "docs/decisions/README.md",
    *NOTES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(ROOT.glob("*/results/*.md")),
]


def test_links_lead_somewhere():
    """Links to files of this repository, pictures included."""
    broken = [
        f"{page.relative_to(ROOT)} links to {target}"
        for page in LINKED
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if not target.startswith(("http:", "https:")) and not (page.parent / target).exists()
    ]
    assert broken == []


def test_a_page_begins_with_its_title():
    assert [page for page in LINKED if not page.read_text().startswith("# ")] == []


def test_files_that_pages_name_are_there():
    """`benchmarks/…`, `docs/…`, `src/…` and the like, wherever they stand between backticks."""
    rooms = "benchmarks|experiments|docs|src|csrc|tests|scripts"
    missing = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(rf"`((?:{rooms})/[\w./-]+)`", page.read_text())
        if not (ROOT / name).exists()
    ]
    assert missing == []


def test_every_decision_is_in_the_index_once_with_a_status():
    rows = (ROOT / "docs/decisions/README.md").read_text().splitlines()
    for note in NOTES:
        found = [row for row in rows if row.startswith("| [") and f"]({note.name})" in row.split(" | ")[0]]
        assert len(found) == 1, f"{note.name} stands in {len(found)} rows of docs/decisions/README.md, not in one"
        status = found[0].split(" | ")[1]
        assert status.startswith(("accepted", "superseded by [", "superseded in part: ")), found[0]
        for later in re.findall(r"\]\(([^)]+)\)", status):
            assert later in note.read_text(), f"{note.name} does not name {later}, which superseded it"


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == tarnn.__version__
    assert all(x["authors"] and x["title"] and x["type"] for x in [citation, *citation["references"]])


def test_hosted_tests_cover_the_pythons_and_the_oldest_torch_that_are_promised():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={matrix['python'][0]}"
    oldest = next(x for x in project["dependencies"] if x.startswith("torch")).removeprefix("torch>=")
    assert matrix["torch"] == [f"torch=={oldest}.0", "torch"]
