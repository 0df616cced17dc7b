"""Known families' folders and our own are loaded, continued, described, measured and served without transformers."""

import json
import re
import signal
import subprocess
import sys

import httpx
import pytest
from support.open_folders import make_folder

from tarnn.data.tokenizers import byte_tokenizer
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnForImageGeneration, TarnnImageConfig

ENDS = (
    "import sys; loaded = [x for x in ('transformers', 'accelerate', 'huggingface_hub') if x in sys.modules]; "
    "print(); print('loaded', len(loaded))"
)
COMMANDS = (
    "from tarnn.cli.main import main; import json, sys; "
    f"codes = [main(x) for x in json.loads(sys.argv[1])]; {ENDS}; sys.exit(max(codes))"
)
COMMAND = f"from tarnn.cli.main import main; import sys; code = main(sys.argv[1:]); {ENDS}; sys.exit(code)"
LOAD = f"import sys, tarnn; print(*tarnn.load(sys.argv[1]).generate('Call me', max_new_tokens=5)); {ENDS}"


@pytest.fixture(scope="module", params=["Llama", "Qwen3.5"])
def folder(request, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("folders") / "tiny", request.param)


def last_line(*argv):
    run = subprocess.run([sys.executable, "-c", *map(str, argv)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1]


def all_of(lines):
    return last_line(COMMANDS, json.dumps([[str(x) for x in line] for line in lines]))


def test_load(folder):
    assert last_line(LOAD, folder) == "loaded 0"


def test_commands(folder, tmp_path):
    (tmp_path / "a.txt").write_text("Wunderland ist ueberall. " * 8)
    state = tmp_path / "s"
    lines = [
        ["generate", folder, "--prompt", "Call me", "--max-new-tokens", 3, "--state-out", state],
        ["generate", folder, "--max-new-tokens", 3, "--state-in", state],
        ["info", folder, "--json"],
        ["eval", folder, tmp_path / "a.txt"],
    ]
    assert all_of(lines) == "loaded 0"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Folders of tarnn's own: a hybrid with a tokenizer, one of bytes without, and one of images."""
    top = tmp_path_factory.mktemp("own")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "initializer_range": 0.3}
    TarnnForCausalLM(TarnnConfig(**sizes, attention=["linear", "softmax"], eos_token_id=256)).save_pretrained(
        top / "text"
    )
    byte_tokenizer().save_pretrained(top / "text")
    TarnnForCausalLM(TarnnConfig(**sizes, vocab_size=256)).save_pretrained(top / "bytes")
    images = TarnnImageConfig(**sizes, image_height=4, image_width=3, num_classes=2)
    TarnnForImageGeneration(images).save_pretrained(top / "images")
    return top


OWN = [
    ["generate", "text", "--prompt", "Call me", "--max-new-tokens", 3],
    ["generate", "bytes", "--prompt", "Call me", "--max-new-tokens", 3],
    ["generate", "images", "--num-samples", 2, "--out", "a.png"],
    ["info", "text"],
    ["info", "bytes", "--weights", "int8"],
    ["info", "images"],
    ["eval", "text", "a.txt"],
    ["eval", "text", "a.txt", "--weights", "int8"],
    ["pack", "text", "text.tarnn"],
]


def test_commands_on_folders_of_our_own(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("Wunderland ist ueberall. " * 8)
    assert all_of([command, own / name, *rest] for command, name, *rest in OWN) == "loaded 0"


def test_a_run_is_measured_on_what_it_held_out(train, text, tmp_path):
    code, _, err = train()
    assert code == 0, err
    assert last_line(COMMAND, "eval", tmp_path / "run") == "loaded 0"


def test_serve(folder, tmp_path):
    chat = {"messages": [{"role": "user", "content": "Who is Ishmael?"}], "max_tokens": 5}
    assert served(folder, tmp_path, "chat/completions", chat) == "loaded 0"


@pytest.mark.parametrize("name", ["text", "bytes"])
def test_serve_a_folder_of_our_own(own, tmp_path, name):
    assert served(own / name, tmp_path, "completions", {"prompt": "Who?", "max_tokens": 5}) == "loaded 0"


def served(folder, states, place, body):
    """The last line of a server that has answered one request."""
    line = [sys.executable, "-c", COMMAND, "serve", str(folder), "--port", "0", "--state-dir", str(states)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = ""
            while not (match := re.search(r"(http://\S+)/v1 answers", said)):
                assert process.poll() is None, said
                said += process.stderr.readline()
            answer = httpx.post(f"{match[1]}/v1/{place}", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            assert json.loads(answer.text)["usage"]["completion_tokens"] > 0
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
            return out.splitlines()[-1]
        finally:
            process.kill()


@pytest.mark.parametrize("command", ["generate", "info", "serve"])
def test_an_unknown_family_is_refused_without_it(tmp_path, command):
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    run = subprocess.run([sys.executable, "-c", COMMAND, command, tmp_path], capture_output=True, text=True)
    assert (run.returncode, run.stdout.splitlines()[-1]) == (2, "loaded 0"), run.stderr


def test_what_is_counted_is_counted_where_there_is_something():
    assert int(last_line("import transformers; " + ENDS).split()[-1]) > 0
