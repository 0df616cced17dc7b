"""The command line's door: which errors become one line, which stay bugs, and how little it imports."""

import errno
import subprocess
import sys

import pytest

from tarnn.cli import main as cli
from tarnn.errors import OneProcessError, UserError

HEAVY = ("transformers", "datasets", "matplotlib", "rich", "tarnn.models")


@pytest.fixture
def command(monkeypatch):
    """command(error) → a `tarnn info` that raises it, from tarnn's own code unless told otherwise."""

    def install(error, module="tarnn.anything"):
        import types

        fake = types.ModuleType("tarnn.cli.info")
        exec("def info(): raise error", given := {"error": error, "__name__": module})
        fake.info = given["info"]
        monkeypatch.setitem(sys.modules, "tarnn.cli.info", fake)

    monkeypatch.delenv("TARNN_TRACEBACK", raising=False)
    return install


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("expected this,\n  got that"), "expected this, got that"),
        (ValueError("q is too long"), "q is too long"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x.txt"), "[Errno 2] No such file: 'x.txt'"),
    ],
)
def test_what_the_user_can_mend_is_one_line(command, capsys, monkeypatch, error, line):
    command(error)
    assert cli.main(["info"]) == 2
    assert capsys.readouterr() == ("", f"tarnn: error: {line}\n")
    monkeypatch.setenv("RANK", "1")  # of several processes the first one speaks
    assert cli.main(["info"]) == 2
    assert capsys.readouterr().err == ""
    command(OneProcessError("process 1 of 2: lost"))
    assert cli.main(["info"]) == 2
    assert capsys.readouterr().err == "tarnn: error: process 1 of 2: lost\n"
    command(error)
    monkeypatch.setenv("TARNN_TRACEBACK", "1")
    with pytest.raises(type(error)):
        cli.main(["info"])


def test_bugs_keep_their_traceback(command):
    command(ValueError("deep in a library"), module="numpy.linalg")
    with pytest.raises(ValueError, match="deep in a library"):
        cli.main(["info"])
    command(KeyError("k"))
    with pytest.raises(KeyError):
        cli.main(["info"])


def test_what_a_foreign_model_raises_as_it_runs_is_one_line(command, capsys):
    for module in ("transformers.models.llama.modeling_llama", "transformers.tokenization_utils_tokenizers"):
        command(TypeError("new(): invalid data type.."), module=module)
        assert cli.main(["info"]) == 2
        line = capsys.readouterr().err
        assert line.startswith(
            "tarnn: error: the model or its tokenizer can't run: new(): invalid data type. Its files"
        )


def test_an_error_is_a_line_of_text_however_much_it_quotes(command, capsys):
    command(UserError("got '" + "\x1b[2J" + "x" * 10**6 + "'; expected less."))
    assert cli.main(["info"]) == 2
    line = capsys.readouterr().err
    assert len(line) < 700
    assert line.endswith("xx'; expected less.\n")
    assert "\\x1b[2Jxx" in line


def test_control_c(command, capsys):
    command(KeyboardInterrupt())
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "tarnn: interrupted\n"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'? See `tarnn --help`."),
        (["--frob"], "No such option: --frob. See `tarnn --help`."),
        (["train"], "Missing argument 'SOURCE...'. See `tarnn train --help`."),
        (
            ["train", "x", "--out", "y", "--task", "speech"],
            "Invalid value for '--task': 'speech' is not one of 'text', 'masked-lm', 'image', "
            "'classification', 'ctc'. See `tarnn train --help`.",
        ),
    ],
)
def test_a_command_line_that_is_wrong(argv, line, capsys):
    assert cli.main(argv) == 2
    assert capsys.readouterr().err == f"tarnn: error: {line}\n"


def test_help_and_version_import_nothing_heavy():
    code = (
        "import sys; from tarnn.cli.main import main; assert main([]) == 0; assert main(['--version']) == 0; "
        f"sys.exit(any(name in sys.modules for name in {HEAVY}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert f"\n  {name} " in done.stdout


def test_the_package_is_the_command():
    done = subprocess.run([sys.executable, "-m", "tarnn", "trian"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("tarnn: error: No such command 'trian'")


def test_each_command_has_help(capsys):
    assert cli.main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--out", "--resume", "--max-minutes", "--set"):
        assert option in shown


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_an_example_and_fits_a_terminal(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Example: tarnn {name} " in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_paragraph_of_help_is_one_line():
    assert cli.help_of("One\n    thing.\n\n    Two.\n    ", "tarnn x") == "One thing.\n\nTwo.\n\nExample: tarnn x"


COSTLY = ("transformers", "transformers.modeling_utils", "torch._dynamo", "sympy", "scipy")


def costly_imports(code):
    """Which of the costly modules a fresh Python imports that runs `code`."""
    code += f"; import sys; print(*(set({COSTLY}) & {{*sys.modules}}), file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stderr.splitlines()[-1].split())


def test_info_of_the_machine_imports_little_but_torch():
    assert not costly_imports("from tarnn.cli.main import main; main(['info'])")


LINES = (["info"], ["generate", "--prompt", "x", "--max-new-tokens", "10"])


@pytest.mark.parametrize("kind", ["single", pytest.param("hybrid", marks=pytest.mark.slow)])
@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_a_checkpoint_is_read_without_what_only_training_needs(line, kind, checkpoints):
    """Neither transformers' models nor torch's compiler."""
    command, *options = line
    code = f"from tarnn.cli.main import main; main({[command, str(checkpoints[kind]), *options]!r})"
    assert costly_imports(code) <= {"transformers"}
