"""Other servers on the same machine, on a Llama of the linear model's shape.

ENVIRONMENT, the interpreter's folder that `serve.py --python` names, holds what is measured: the program `llama-server` and the
package `gguf`; `transformers serve` with what it needs. What is missing is named, and its rows are left out.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.loads import Body, Wrong, apply_load, check_whole, completion, prompts, speed_of, written
from toolkit.serve_cases import SHORT, tarnn_server
from toolkit.served_models import vocabulary
from toolkit.servers import HOST, NotStarted, Server, serving
from toolkit.talks import cached_by_usage, talk, talk_from_states

LLAMA = "llama.cpp"
TRANSFORMERS, BATCHING = "transformers serve", "transformers serve, continuous batching"
LLAMA_TYPES = {"float32": "float32", "int8": "int8"}  # as `decode_workers.py` names them
GGUF_WORKER = Path(__file__).parent / "decode_workers.py"


class Missing(Exception):
    """What the environment lacks."""


def environment(options) -> Path:
    """The folder with programs and the interpreter. Raises Missing where none was named."""
    if options.python == Path(sys.executable):
        raise Missing("no environment was named: --python")
    return options.python.parent


# --- llama.cpp


def llama_file(options, folder: Path, inner: int, weights: str) -> Path:
    """The Llama as a GGUF file with the tokenizer of `folder`."""
    environment(options)
    file = folder.parent / f"llama-{weights}.gguf"
    if not file.exists():
        given = {
            "engine": "gguf",
            "weights": weights,
            "file": str(file),
            "shape": {
                "hidden": options.hidden,
                "layers": options.layers,
                "heads": options.heads,
                "kv_heads": options.heads,
                "inner": inner,
                "vocab": options.vocab,
            },
            "vocabulary": vocabulary(folder),
        }
        said = folder.parent / f"llama-{weights}.json"
        said.write_text(json.dumps(given))
        done = subprocess.run([options.python, str(GGUF_WORKER), f"@{said}"], capture_output=True, text=True)
        if done.returncode:
            file.unlink(missing_ok=True)
            raise Missing((done.stderr.strip().splitlines() or ["gguf ended without a word"])[-1])
    return file


@contextmanager
def llama_server(options, file: Path, slots: int, context: int) -> Iterator[Server]:
    """llama.cpp's own server: so many slots, each with room for so many tokens."""
    program = environment(options) / "llama-server"
    if not program.exists():
        raise Missing(f"there is no {program.name} beside the interpreter")
    threads = str(options.threads)
    command = [str(program), "-m", str(file), "--host", HOST, "--port", "{port}", "-t", threads, "-tb", threads]
    command += ["-np", str(slots), "-c", str(slots * context), "--chat-template", "chatml"]
    with serving(command, file.with_suffix(".log"), model="llama") as server:
        yield server


def llama_cpp(options, folder: Path, inner: int, weights: str) -> dict[str, Any]:
    """Tokens a second by streams (as many slots as streams), and the conversation (one slot)."""
    file, found = llama_file(options, folder, inner, weights), {}
    room = SHORT + options.tokens + 32
    for streams in options.streams:
        with llama_server(options, file, streams, room) as server:
            found[str(streams)] = baseline_speed(options, server, streams, options.tokens, ignore_eos=True)
    room = options.turns * (150 + options.turn_tokens) + 512
    with llama_server(options, file, 1, room) as server:
        found["talk"] = talk(server, options.turns, options.turn_tokens, cached_by_usage, ignore_eos=True)
    return found


def baseline_speed(options, server: Server, streams: int, tokens: int, waves: int = 0, **fields: Any) -> dict[str, Any]:
    number = streams * (waves or options.waves)
    warm = [completion(server, ids, 4, **fields) for ids in prompts(streams, SHORT, options.vocab, seed=9)]
    apply_load(server, {"": {"streams": streams, "bodies": warm}})
    bodies = [completion(server, ids, tokens, **fields) for ids in prompts(number, SHORT, options.vocab)]
    load = apply_load(server, {"streams": {"streams": streams, "bodies": bodies}}, seconds=400)
    check_whole(load.groups["streams"], number, tokens)
    return speed_of(load, "streams")


# --- transformers serve


@contextmanager
def transformers_server(options, folder: Path, *words: str) -> Iterator[Server]:
    code = "from transformers.cli.transformers import app; app()"
    command = [str(environment(options) / options.python.name), "-c", code, "serve", str(folder), "--host", HOST]
    command += ["--port", "{port}", "--device", "cpu", "--dtype", "float32", *words]
    surroundings = {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    log = folder.parent / "transformers.log"
    with serving(command, log, environment=surroundings, model=str(folder)) as server:
        yield server


def said_in_chat(server: Server, text: str, tokens: int) -> Body:
    """A body of /v1/chat/completions with the fields that transformers takes."""
    messages = [{"role": "user", "content": text}]
    return {"model": server.model, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}


TOGETHER = ("--continuous-batching", "--cb-max-memory-percent", "0.1")  # all streams in one batch


def transformers_serve(options, folder: Path, *words: str) -> dict[str, Any]:
    """Tokens a second by streams, with fewer tokens each, and the conversation. words: more of its options."""
    found: dict[str, Any] = {}
    with transformers_server(options, folder, *words) as server:
        for streams in options.streams:
            tokens = max(8, options.tokens // 8)
            bodies = [said_in_chat(server, f"text {i} begins here", tokens) for i in range(streams)]
            apply_load(server, {"": {"streams": 1, "bodies": bodies[:1]}}, "/v1/chat/completions")
            groups = {"streams": {"streams": streams, "bodies": bodies}}
            load = apply_load(server, groups, "/v1/chat/completions", seconds=100)
            check_whole(load.groups["streams"], streams, written(load.groups["streams"][0]))
            found[str(streams)] = speed_of(load, "streams")
        # it keeps nothing between requests, and so doesn't tell what was cached
        found["talk"] = talk(server, options.turns, options.turn_tokens, lambda answer: 0)
    return found


# --- tarnn, in the same conversation


def own_talks(options, folder: Path, weights: str) -> dict[str, Any]:
    """A server for each way: the second conversation would find the first one's states."""
    with tarnn_server(options, folder, weights) as server:
        by_prompt = talk(server, options.turns, options.turn_tokens, cached_by_usage)
    with tarnn_server(options, folder, weights) as server:
        return {"prompt": by_prompt, "response": talk_from_states(server, options.turns, options.turn_tokens)}


def or_why_not(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was measured, or {"missing": the reason}: a case that fails holds up no other."""
    try:
        return measure()
    except (Missing, NotStarted, Wrong) as reason:
        return {"missing": str(reason)}
    except Exception as error:
        return {"missing": f"{type(error).__name__}: {error}"}
