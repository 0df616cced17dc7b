"""The table of the families that `tarnn.load` opens, for docs/families.md.

A cell says "yes" where a test of that name is collected. `families_table.py` writes it into the page.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAMILIES, OWN, CONVERTED, RWKV = (f"tests/families/test_{x}.py::" for x in ("families", "own", "converted", "rwkv7"))
SERVED = "tests/serving/test_open_folders.py::"
PACKED = "tests/decoding/test_packed_file.py::test_logits_and_states_are_the_folders"
FILES = sorted({x.partition("::")[0] for x in (FAMILIES, OWN, CONVERTED, RWKV, SERVED, PACKED)})
FILES.append("tests/serving/test_every_place_is_exact.py")
FORMATS = ("bfloat16", "int8", "int4")
COLUMNS = ("logits", "steps", "padding", "200 prompts", "served exactly", "packed")
OTHERS = {  # family: the tests of its columns, where they have other names
    "tarnn's own models of text": {
        "logits": OWN + "test_texts_and_their_states",
        "steps": OWN + "test_texts_compiled",
        "served exactly": "tests/serving/test_every_place_is_exact.py::",
        "packed": f"{PACKED}[own-",
        "float32": OWN + "test_texts_compiled",
    },
    "softmax models that `tarnn convert` converted": {
        "logits": CONVERTED + "test_logits",
        "steps": CONVERTED + "test_logits",
        "served exactly": SERVED + "test_a_converted_model_is_served_alike",
    },
    "RWKV-7, with fla's names or rwkv.cpp's": {
        "logits": RWKV + "test_logits_of_a_trained_model",
        "steps": RWKV + "test_logits_and_states_are_those_of_the_model",
        "float32": RWKV + "test_logits_of_a_trained_model",
    },
}


def opened_families() -> str:
    """Return the section of the page."""
    names = collected()
    rows = [row(name, tests_of(name), names) for name in published(names)]
    rows += [row(name, tests, names) for name, tests in OTHERS.items()]
    return f"""## Folders that open as they are: `tarnn.load`

These families are data: `tarnn.load(folder)`, `tarnn generate`, `info`, `eval`, `pack` and `serve` read config.json, the
safetensors files and tokenizer.json, and need no code of transformers for it. Most rows are the config of a released model, made
narrower, with random weights. "yes": there is a test of it.

* **logits**: they equal those of transformers, up to twice the largest difference between transformers' own ways to compute them.
  For tarnn's own, converted and RWKV-7 models they equal those of the model in PyTorch; for a trained RWKV-7,
  those saved with it.
* **steps**: token by token, or in pieces, as at once. **padding**: rows of a padded batch are as each row alone.
* **200 prompts**: the most likely next tokens of 200 prompts are those of transformers.
* **formats** that run compiled, compared with the definition in float64.
* **served exactly**: behind other requests, from a cache and after a restart, an answer is the same to the bit.
* **packed**: a file of `tarnn pack` gives the folder's logits and states, to the bit, in all formats.

| family | {" | ".join(COLUMNS[:4])} | formats | {" | ".join(COLUMNS[4:])} |
|{"---|" * 8}
{chr(10).join(rows)}
"""


def collected() -> list[str]:
    """Return the names of all tests in `FILES`, slow ones too."""
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *FILES]
    found = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in found if "::" in line]


def published(names: list[str]) -> list[str]:
    """Return the released configs that are tested, by the names of the tests."""
    test = FAMILIES + "test_logits["
    return [name.removeprefix(test).removesuffix("]") for name in names if name.startswith(test)]


def tests_of(name: str) -> dict[str, str]:
    """Return the tests of a released config's columns. A name ends where the test's own parameters begin."""
    from support.open_folders import SHORT

    short = SHORT.get(name, name)
    formats = {x: f"{FAMILIES}test_compiled_formats[{name}-{x}-" for x in FORMATS}
    return {
        "logits": f"{FAMILIES}test_logits[{name}]",
        "steps": f"{FAMILIES}test_steps_are_the_whole[{name}]",
        "padding": f"{FAMILIES}test_padded_on_the_left_is_a_row_alone[{name}]",
        "200 prompts": f"{FAMILIES}test_greedy_tokens[{name}]",
        "served exactly": f"{SERVED}test_a_second_turn_reads_its_own_tokens[{short}]",
        "packed": f"{PACKED}[{short}-",
        "float32": f"{FAMILIES}test_compiled[{name}]",
        **formats,
    }


def row(name: str, tests: dict[str, str], names: list[str]) -> str:
    """Return a row of the table. A cell without a test has a dash."""
    tested = {column for column, test in tests.items() if any(x.startswith(test) for x in names)}
    formats = [x for x in ("float32", *FORMATS) if x in tested]
    cells = ["yes" if column in tested else "–" for column in COLUMNS]
    return f"| {name} | {' | '.join(cells[:4])} | {', '.join(formats) or '–'} | {' | '.join(cells[4:])} |"
