"""Folders of known families are loaded, continued, described, measured and served without a module of transformers."""

import json
import re
import signal
import subprocess
import sys

import httpx
import pytest
from support.open_folders import make_folder

ENDS = "import sys; loaded = [x for x in sys.modules if x.split('.')[0] == 'transformers']; print(); print('loaded', len(loaded))"
COMMAND = f"from tarnn.cli.main import main; import sys; code = main(sys.argv[1:]); {ENDS}; sys.exit(code)"
LOAD = f"import sys, tarnn; print(*tarnn.load(sys.argv[1]).generate('Call me', max_new_tokens=5)); {ENDS}"


@pytest.fixture(scope="module", params=["Llama", "Qwen3.5"])
def folder(request, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("folders") / "tiny", request.param)


def last_line(*argv):
    run = subprocess.run([sys.executable, "-c", *map(str, argv)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1]


def test_load(folder):
    assert last_line(LOAD, folder) == "loaded 0"


def test_commands(folder, tmp_path):
    (tmp_path / "a.txt").write_text("Wunderland ist ueberall. " * 8)
    state = tmp_path / "s"
    for line in (
        ["generate", folder, "--prompt", "Call me", "--max-new-tokens", 3, "--state-out", state],
        ["generate", folder, "--max-new-tokens", 3, "--state-in", state],
        ["info", folder, "--json"],
        ["eval", folder, tmp_path / "a.txt"],
    ):
        assert last_line(COMMAND, *line) == "loaded 0", line


def test_serve(folder, tmp_path):
    line = [sys.executable, "-c", COMMAND, "serve", str(folder), "--port", "0", "--state-dir", str(tmp_path)]
    chat = {"messages": [{"role": "user", "content": "Who is Ishmael?"}], "max_tokens": 5}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = ""
            while not (match := re.search(r"(http://\S+)/v1 answers", said)):
                assert process.poll() is None, said
                said += process.stderr.readline()
            answer = httpx.post(f"{match[1]}/v1/chat/completions", json=chat, timeout=60)
            assert answer.status_code == 200, answer.text
            assert json.loads(answer.text)["usage"]["completion_tokens"] > 0
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            assert out.splitlines()[-1] == "loaded 0", err
        finally:
            process.kill()


@pytest.mark.parametrize("command", ["generate", "info", "serve"])
def test_an_unknown_family_is_refused_without_it(tmp_path, command):
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    run = subprocess.run([sys.executable, "-c", COMMAND, command, tmp_path], capture_output=True, text=True)
    assert (run.returncode, run.stdout.splitlines()[-1]) == (2, "loaded 0"), run.stderr


def test_what_is_counted_is_counted_where_there_is_something():
    assert int(last_line("import transformers; " + ENDS).split()[-1]) > 0
