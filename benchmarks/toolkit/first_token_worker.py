"""One contender of `first_token.py`, in a process of its own: opens a folder, reads a prompt, and writes two texts.

    PYTHONPATH=CHECKOUT/src python benchmarks/toolkit/first_token_worker.py '{"folder": …, "by": "tarnn", "weights": "int8", …}'

by: "tarnn" opens the folder by `tarnn.load`; "transformers" by `from_pretrained`, and "patched" too, under
`tarnn.patch_transformers()`, with these weights (null: `forward` alone; none: by default), and with "forgets" packed anew for
each text. It prints one line: seconds from `begun` until there was a first token, milliseconds of each text and of a token, and
the memory that the process took at most: until all was imported, until the first token, and in the end.
"""

import json
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

PROMPT = 16


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    write = {"tarnn": by_folder, "transformers": by_transformers, "patched": by_patched}[given["by"]](given)
    ids = torch.randint(3, given["vocabulary"], (1, PROMPT), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        write(ids, 1)
        found: dict[str, Any] = {
            "first_token_s": time.time() - given["begun"],
            **memory(),
            "imported_bytes": given["imported"],
        }
        for turn in ("first_turn_ms", "second_turn_ms"):
            found[turn] = milliseconds(write, ids, given["tokens"])
        alone = min(milliseconds(write, ids, 1) for _ in range(2))
        found["token_ms"] = (found["second_turn_ms"] - alone) / (given["tokens"] - 1)
    print(json.dumps(found | {"peak_after_turns": memory()["peak_bytes"]}), flush=True)


def milliseconds(write: Any, *arguments: Any) -> float:
    begun = time.perf_counter()
    write(*arguments)
    return 1000 * (time.perf_counter() - begun)


def memory() -> dict[str, int]:
    """Return the bytes that the process held at most, and those that are its own now, of no file."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"peak_bytes": "VmHWM", "own_bytes": "RssAnon"}
    return {name: 1024 * int(lines[field].split()[0]) for name, field in names.items()}


def by_folder(given: dict[str, Any]) -> Any:
    import tarnn
    from tarnn.decoding import from_program  # noqa: F401 (what opens it is imported)

    given["imported"] = memory()["peak_bytes"]
    lm = tarnn.load(given["folder"], given["weights"], tokenizer=object())

    def write(ids: torch.Tensor, tokens: int) -> None:
        logits, state = lm.opened.prefill(ids, lm.opened.new_state(1, PROMPT + tokens), inplace=True)
        for _ in range(tokens - 1):
            logits, state = lm.opened.step(logits.argmax(-1), state, inplace=True)

    return write


def model_of(given: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    given["imported"] = memory()["peak_bytes"]
    return AutoModelForCausalLM.from_pretrained(given["folder"]).eval()


def generate(model: Any, ids: torch.Tensor, tokens: int) -> None:
    model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)


def by_transformers(given: dict[str, Any]) -> Any:
    return partial(generate, model_of(given))


def by_patched(given: dict[str, Any]) -> Any:
    import tarnn
    from tarnn.decoding.kept import forget
    from tarnn.huggingface.fused_forward import fused_forward

    tarnn.patch_transformers()
    model = model_of(given)

    def write(ids: torch.Tensor, tokens: int) -> None:
        if given.get("forgets"):
            forget(model)
        with fused_forward(model, given["weights"]) if "weights" in given else nullcontext():
            generate(model, ids, tokens)

    return write


if __name__ == "__main__":
    main()
