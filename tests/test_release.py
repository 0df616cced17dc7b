"""What a release is made with: hosted workflows that name what exists, libraries that need torch's stable interface alone, and
the folder for the kernels hub."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import tarnn
from scripts.hub import build as hub
from scripts.wheels import symbols
from tarnn.kernels.cpu import library

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
LIBRARIES = [library.BINARY, library.BINARY.with_name("libtarnn.so")]
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def jobs_of(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def steps(path):
    return [step for job in jobs_of(path).values() for step in job["steps"]]


@each_workflow
def test_jobs_wait_for_jobs_that_are_there(path):
    jobs = jobs_of(path)
    needed = [name for job in jobs.values() for name in job.get("needs", [])]
    assert set(needed) <= set(jobs)


@each_workflow
def test_every_step_does_one_thing(path):
    for step in steps(path):
        assert ("run" in step) != ("uses" in step), step
        assert set(step) <= {"name", "if", "id", "run", "uses", "with", "env"}, step


@each_workflow
def test_actions_have_versions(path):
    for action in (step["uses"] for step in steps(path) if "uses" in step):
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", action), action


@each_workflow
def test_a_matrix_has_what_is_read_of_it(path):
    for name, job in jobs_of(path).items():
        read = set(re.findall(r"\$\{\{ matrix\.(\w+) \}\}", str(job)))
        assert read <= set(job.get("strategy", {}).get("matrix", {})) - {"include"}, name


@each_workflow
def test_nothing_may_write_unless_it_says_so(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 240 for job in workflow["jobs"].values())


@each_workflow
def test_files_and_targets_that_commands_name_are_there(path):
    commands = "\n".join(step["run"] for step in steps(path) if "run" in step)
    for name in re.findall(r"(?<![\w/.])(?:scripts|tests|src|docs)/[\w/.-]+", commands):
        assert (ROOT / name).exists(), name
    targets = set(re.findall(r"^([\w-]+)(?: [\w-]+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([\w-]+)", commands)) <= targets | {"test", "nightly"}


def test_only_a_tag_publishes_and_after_all_else():
    jobs = jobs_of(ROOT / ".github/workflows/release.yml")
    writers = {name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()}
    assert writers == {"publish"}
    publish = jobs["publish"]
    assert publish["if"] == "github.ref_type == 'tag'"
    assert publish["environment"]["name"] == "pypi"
    before, wave = set(), ["publish"]
    while wave:
        wave = [name for each in wave for name in jobs[each].get("needs", [])]
        before |= set(wave)
    assert before == set(jobs) - {"publish"}
    assert "secrets" not in str(jobs)


def test_the_changelog_begins_with_this_version():
    heading = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert re.fullmatch(rf"{re.escape(tarnn.__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)|Unreleased", heading)


def test_import_takes_fifty_milliseconds_at_most():
    """Over torch's own, of one core's time."""
    code = "import time, torch; began = time.process_time(); import tarnn; print(time.process_time() - began)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) <= 0.05


def test_the_symbols_that_may_be_needed_of_torch():
    names = symbols.of_torch()
    assert {"aoti_torch_get_dtype", "torch_parallel_for", "aoti_torch_delete_library_object"} <= names
    declared = re.findall(r"^  X\((\w+)", (ROOT / "csrc/torch.h").read_text(), re.MULTILINE)
    assert len(names) == len(declared) == len(set(declared))


on_linux = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("nm"), reason="it takes nm, on Linux")


@on_linux
@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.stem)
def test_libraries_need_torchs_stable_interface_alone(path):
    if not path.exists():
        pytest.skip("the kernels are not compiled here")
    assert symbols.foreign(path) == set()


@on_linux
def test_a_symbol_of_torch_that_is_not_stable_is_seen(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = "namespace at { int get_num_threads(); } int f() { return at::get_num_threads(); }"
    made = tmp_path / "made.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", made]
    subprocess.run(command, input=source, text=True, check=True)
    assert symbols.foreign(made) == {"_ZN2at15get_num_threadsEv"}


# --- the folder for the kernels hub


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub") / "tarnn-recurrences"
    hub.make(out)
    return out


def test_the_hub_folder_has_all_that_it_names(hub_folder):
    settings = tomllib.loads((hub_folder / "build.toml").read_text())
    kernel = settings["kernel"]["recurrences"]
    names = [*kernel["src"], *settings["torch"]["src"]]
    assert len(names) == len(set(names))
    listed = {hub_folder / name for name in names}
    assert all(path.is_file() for path in listed)
    for path in {x for folder in ("cpu", "csrc") for x in (hub_folder / folder).rglob("*") if x.is_file()}:
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            found = [x for x in (path.parent / name, hub_folder / "csrc" / name) if x.is_file()]
            assert found, f"{path} includes {name}"
            assert found[0].suffix == ".cpp" or found[0] in listed, f"build.toml does not list {found[0]}"
    assert kernel["src"].index("cpu/avx2.cpp") > max(
        kernel["src"].index(x) for x in kernel["src"] if x.endswith("operators.cpp")
    )


def test_the_hub_package_needs_torch_alone(hub_folder):
    """It is loaded from any place, under any name: so it imports its own files by dots."""
    for path in (hub_folder / hub.PACKAGE).rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level:
                home = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                assert home.is_dir() or home.with_suffix(".py").is_file() or home.name == "_ops", (path, node.module)
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in names:
                assert name.split(".")[0] in {*sys.stdlib_module_names, "torch"}, (path, name)
        assert "tarnn_cpu" not in text


@pytest.mark.slow
@on_linux
def test_the_hub_folder_compiles_and_keeps_the_laws(tmp_path):
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    command = [sys.executable, "scripts/hub/build.py", "--try", "--out", tmp_path / "tarnn-recurrences"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
