"""The rules of the house: which room may look into which, and what importing tarnn costs."""

import ast
import importlib
import pkgutil
import subprocess
import sys
import traceback
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from pathlib import Path

import pytest
from support.house import FILES, SOURCE, TREES, arrows, imports, loads_by_name, re_exports, room_of

# floor by floor: a room looks into those above it, and only into those that stand here
ROOMS = {
    "kernels": set(),
    "feature_maps": set(),
    "data": set(),
    "ops": {"kernels", "feature_maps"},
    "attention": {"ops", "feature_maps"},
    "models": {"ops", "feature_maps", "attention"},
    "parallel": {"kernels", "ops", "feature_maps", "attention", "models"},  # wraps them from outside
    "analysis": {"ops", "feature_maps", "attention", "models"},
    "program": {"kernels", "ops", "models"},
    "families": {"program", "models", "feature_maps", "attention"},
    # decoding and its entrance in huggingface look into kernels for the fused step
    "decoding": {"program", "families", "kernels", "ops", "feature_maps", "attention", "models", "data"},
    "huggingface": {"kernels", "ops", "feature_maps", "attention", "models", "decoding"},
    "tasks": {"families", "ops", "feature_maps", "attention", "models", "huggingface", "decoding", "data"},
    "training": {"parallel", "ops", "feature_maps", "attention", "models", "huggingface", "data", "tasks"},
    # finetune trains, and the files of a checkpoint are read in one way
    "conversion": {"ops", "feature_maps", "models", "huggingface", "decoding", "data", "tasks", "training"},
    "export": {"program", "families", "decoding", "feature_maps", "attention", "models"},
    "tuning": {"families", "models", "huggingface", "decoding", "data", "tasks", "training", "conversion"},
    "laws": {"program", "decoding", "huggingface", "models", "tasks", "conversion"},
    "serving": {"ops", "models", "program", "decoding", "data", "tasks"},
}
ROOMS["cli"] = set(ROOMS) - {"kernels"}
GROUND = {
    "_version", "auto_classes", "checkpoint_keys", "log", "errors", "extras", "json_file", "large_pages", "lazy",
    "log_features", "matmul", "numerics", "other_names", "registry", "removed", "tarnn",
    "weight_files",
}  # fmt: skip
COMPUTES_NAMES = {  # files that import a module by a name which stands nowhere in their text, and so is unseen by these tests
    "tarnn.lazy": "names of packages, on first use",
    "tarnn.registry": "the files of a package, for all names that they declare",
    "tarnn.kernels.contract": "backends",
    "tarnn.cli.main": "a command, when it is called",
    "tarnn.families.by_name": "the file of one family",
    "tarnn.export.formats": "the file of one format",
    "tarnn.huggingface.patching.patch": "the files of transformers' families",
    "tarnn.huggingface.patching.fla": "files of flash-linear-attention, whose functions it replaces",
}
MAY_LOOK_UP = {
    "tarnn.auto_classes": {"huggingface", "conversion"},  # when transformers asks for a class of theirs
    "tarnn.decoding.opening": {"conversion", "tasks"},  # until families make what runs
    "tarnn.program.state": {"attention"},  # when a program has a layer of that kind
}


def test_imports_point_one_way():
    upward = [
        f"{module} imports from {room}"
        for module in FILES
        if module != "tarnn.__main__"
        for room in {room_of(home) for home in arrows(module)} - GROUND - {room_of(module)}
        if room not in ROOMS.get(room_of(module), set()) | MAY_LOOK_UP.get(module, set())
    ]
    assert upward == []


def test_rooms_stand_in_the_order_of_their_floors():
    above = set()
    for room, may_import in ROOMS.items():
        assert may_import <= above
        above.add(room)
    assert {room_of(module) for module in FILES} == {*ROOMS, *GROUND, "__main__"}


def test_no_circle_between_files():
    try:
        TopologicalSorter({module: arrows(module) for module in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" ← ".join(error.args[1]))


def test_a_name_is_imported_from_where_it_is_made():
    """Or a third file could reach, through one that it may import, what it may not."""
    laundered = [
        f"{module} imports {name} from {home}"
        for module in FILES
        for home, name in imports(module)
        if name in re_exports(home)
    ]
    assert laundered == []


def test_who_imports_what_no_test_can_see():
    def imports_by_name(module):
        names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(TREES[module])}
        return "import_module" in names

    assert {module for module in FILES if imports_by_name(module) and not loads_by_name(module)} == set(COMPUTES_NAMES)


TWICE = {  # "room: name": this list only shrinks
    "kernels: Call": "the record of one op's call, in a file of that op",
    "kernels: Outputs": "what a call returns",
    "kernels: Gradients": "what its backward returns",
}
OPENERS = {
    "from_pretrained", "from_config", "safe_open", "load_file", "load_model", "load_state_dict_from_url",
    "unpickle",
}  # fmt: skip
MAY_OPEN = {
    "conversion/opening.py",  # models of transformers
    "decoding/weights.py",  # ours, tensor by tensor
    "families/weights.py",  # any family's, mapped
    "weight_files.py",  # headers
    "data/saved_tokenizer.py",
    "decoding/packed_file.py",  # what `tarnn pack` wrote, mapped
    "data/tensor_file.py",  # states and caches, which are no checkpoints
    "training/checkpoints.py",  # a run's own, before it is resumed
    "huggingface/backbone.py",  # what others call
}


def test_who_opens_checkpoints():
    """What a folder holds is data; whoever opened it in another place would have to think of all that again."""
    opened = []
    for module, path in FILES.items():
        text, place = path.read_text(), str(path.relative_to(SOURCE))
        called = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            for node in ast.walk(TREES[module])
            if isinstance(node, ast.Call)
        }
        unsafe = {word for word in ("torch.load", "import pickle", "trust_remote_code=True") if word in text}
        opened += [f"{place}: {word}" for word in unsafe | (called & OPENERS if place not in MAY_OPEN else set())]
    assert opened == []


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


LAZY = ("tarnn", "tarnn.attention", "tarnn.feature_maps", "tarnn.models", "tarnn.ops", "tarnn.parallel")


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


def test_no_class_name_twice_in_a_room():
    """Two things of one name in one room are read as one."""
    homes = defaultdict(list)
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[room_of(module), node.name].append(module)
    twice = {f"{room}: {name}": files for (room, name), files in homes.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in TWICE} == {}


def test_the_public_face():
    """Every name that tarnn says it has is there, once, and documented."""
    import tarnn

    assert len(tarnn.__all__) == len(set(tarnn.__all__))
    for name in tarnn.__all__:
        assert getattr(tarnn, name).__doc__, name


def test_the_way_of_a_query(monkeypatch):
    """From a model to the kernels one file calls the next: at most twelve, and none is come back to."""
    import torch

    from tarnn.kernels.cpu import linear as compiled
    from tarnn.kernels.eager import linear as plain
    from tarnn.models import TarnnConfig, TarnnForCausalLM

    ways = []
    for kernels in (compiled, plain):

        def forward(*arguments, run=kernels.forward, **options):
            files = [frame.filename for frame in traceback.extract_stack() if str(SOURCE) in frame.filename]
            files = [file for file in files if not file.endswith("huggingface/versions.py")]  # a decorator
            ways.append([file for file, _ in groupby(files)])
            return run(*arguments, **options)

        monkeypatch.setattr(kernels, "forward", forward)
    config = TarnnConfig(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    TarnnForCausalLM(config)(torch.zeros(1, 3, dtype=torch.int64))
    way = [str(Path(file).relative_to(SOURCE)) for file in ways[0]]
    assert len(way) <= 12, way
    assert len(way) == len(set(way)), way
