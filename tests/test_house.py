"""The rules of the house: which room may look into which, and what importing tarnn costs."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tarnn"
MAY_IMPORT = {
    "kernels": set(),
    "feature_maps": set(),
    "data": set(),
    "ops": {"kernels", "feature_maps"},
    "attention": {"ops", "feature_maps"},
    # models look into kernels to sample a likelihood, decoding and its entrance in huggingface for the fused step
    "models": {"kernels", "ops", "feature_maps", "attention"},
    "decoding": {"kernels", "ops", "feature_maps", "attention", "models", "data"},
    "huggingface": {"kernels", "ops", "feature_maps", "attention", "models", "decoding"},
    "analysis": {"ops", "feature_maps", "attention", "models"},
    "tasks": {"ops", "feature_maps", "attention", "models", "huggingface", "decoding", "data"},
    "training": {"ops", "feature_maps", "attention", "models", "data", "tasks"},
    # finetune trains, and the files of a checkpoint are read in one way
    "conversion": {"ops", "feature_maps", "models", "huggingface", "decoding", "data", "tasks", "training"},
    "cli": {
        "ops",
        "feature_maps",
        "attention",
        "models",
        "huggingface",
        "decoding",
        "data",
        "tasks",
        "training",
        "analysis",
        "conversion",
        "kernels",
    },
}
FACADES = {
    "models/__init__.py": {"huggingface"},  # `from tarnn.models import TarnnConfig`, as users write it
    "data/__init__.py": {"tasks"},  # `from tarnn.data import read_images`, as docs once showed it
}
FREE = {
    "auto_classes",
    "errors",
    "extras",
    "json_file",
    "lazy",
    "numerics",
    "registry",
    "_version",
    "other_names",
}  # no room: a leaf that anybody may use
FILES = sorted(p for p in SOURCE.rglob("*.py") if len(p.relative_to(SOURCE).parts) > 1)


def imported_rooms(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{a.name}" for a in node.names}
    return {n.split(".")[1] for n in names if n.startswith("tarnn.")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    room = path.relative_to(SOURCE).parts[0]
    allowed = FREE | {room} | FACADES.get(str(path.relative_to(SOURCE)), set())
    assert imported_rooms(path) - allowed <= MAY_IMPORT[room]


def test_who_imports_from_an_old_place_is_told_the_new_one():
    import tarnn.moved

    for old, new in tarnn.moved.PLACES.items():
        with pytest.raises(ModuleNotFoundError, match=f"{old} is {new} now"):
            importlib.import_module(old)
        importlib.import_module(new)


OPENERS = {
    "from_pretrained",
    "from_config",
    "safe_open",
    "load_file",
    "load_model",
    "load_state_dict_from_url",
    "unpickle",
}
MAY_OPEN = {
    "conversion/opening.py",  # models of transformers
    "decoding/weights.py",  # ours, tensor by tensor
    "data/saved_tokenizer.py",
    "data/tensor_file.py",  # states and caches, which are no checkpoints
    "training/checkpoints.py",  # a run's own, before it is resumed
    "huggingface/backbone.py",  # what others call
    "tasks/text/task.py",  # a run's own, which it has just written
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_who_opens_checkpoints(path):
    """What a folder holds is data; whoever opened it in another place would have to think of all that again."""
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    assert not called & OPENERS or str(path.relative_to(SOURCE)) in MAY_OPEN
    assert "torch.load" not in path.read_text()
    assert "pickle" not in imported_rooms(path) | called
    assert "trust_remote_code=True" not in path.read_text()


@pytest.mark.thorough
def test_import_is_light():
    """All of tarnn but its models needs torch and nothing heavier."""
    code = (
        "import sys, torch; import tarnn; tarnn.linear_attention; tarnn.LinearAttention; "
        "print(*[m for m in ('transformers', 'matplotlib', 'datasets', 'accelerate', 'rich', "
        "'typer', 'tokenizers', 'safetensors') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


@pytest.mark.thorough
def test_the_command_line_opens_without_torch():
    code = "import sys, tarnn, tarnn.cli.main; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


LAZY = ("tarnn", "tarnn.attention", "tarnn.feature_maps", "tarnn.ops")


@pytest.mark.parametrize("name", LAZY)
def test_a_package_has_its_names_and_its_files(name):
    package = importlib.import_module(name)
    files = {file.name for file in pkgutil.iter_modules(package.__path__) if not file.name.startswith("_")}
    # importing `room.name`, a file, sets `room.name` to the module: a function of that name would never be loaded
    assert not set(package.__all__) & files
    assert set(package.__all__) | files <= set(dir(package))
    everything = {}
    exec(f"from {name} import *", everything)
    assert set(package.__all__) <= set(everything)
    assert getattr(package, min(files)).__name__ == f"{name}.{min(files)}"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'; it has"):
        _ = package.nonsense


@pytest.mark.thorough
def test_hybrid_attention_is_public():
    code = (
        "import tarnn.ops.hybrid.op; from tarnn import hybrid_attention; from tarnn.ops import hybrid_step; "
        "assert hybrid_step is tarnn.hybrid_step and callable(hybrid_step) and callable(hybrid_attention)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_public_face():
    """Every name that tarnn says it has is there, once, and documented."""
    import tarnn

    assert len(tarnn.__all__) == len(set(tarnn.__all__))
    for name in tarnn.__all__:
        assert getattr(tarnn, name).__doc__, name
