"""Every script opens; the profilers run through, and speak of functions that there are."""

import re
import subprocess
import sys

import pytest
from support.scripts import ROOT, opens, runnable

sys.path.append(str(ROOT / "scripts" / "dev"))


SCRIPTS = [*runnable("benchmarks"), *runnable("experiments"), *runnable("scripts/dev")]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "training_worker"])
def test_every_script_opens(name, monkeypatch):
    assert opens(name, monkeypatch)


@pytest.mark.slow
def test_a_training_step_is_taken_apart(script, data_of):
    """By a process that trains, and pauses after each round."""
    import training_profile

    assert script("training_profile", "--quick", "--rounds", 2).code == 0
    found = data_of("training_profile")["results"]["now"]
    assert found["parts_ms"]["matrix products"] > 0
    # all but the norms, the decays' bias and the embedding, which is the last layer's matrix
    weights = found["products_ms"] * found["gflops_of_mm"] / 6 / training_profile.TOKENS * 1e6
    assert 0.99 < weights / found["parameters"] < 1


def test_a_contender_that_ends_too_early_is_no_measurement():
    import training_profile

    with (
        subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE, text=True) as ended,
        pytest.raises(training_profile.Unmeasured, match="ended before its time"),
    ):
        training_profile.answer(ended)


def test_parts_are_of_functions_that_there_are():
    import parts

    source = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.h"))
    for names in parts.PARTS.values():
        for name in names.split("|"):
            plain = re.match(r"\w+", name)[0]
            assert re.search(rf"\b{plain}{'' if plain.endswith('_') else '[(<]'}", source), plain


def test_samples_are_counted_for_the_innermost_function_that_has_a_part():
    import parts

    sample = "void tarnn::avx512::{}<float>(float*, tarnn::avx512::Keys<float> const&)"
    assert parts.part_of([sample.format("mask_pairs")]) == "in-chunk"
    assert parts.part_of(["clear_page", "asm_exc_page_fault", sample.format("store_tile")]) == "page faults"
    assert parts.part_of([sample.format("store_tile"), sample.format("causal_outputs")]) == "loads and stores"
    assert parts.part_of(["_PyEval_EvalFrameDefault"]) == "overhead"
