"""All pages in one run, which goes on where it was stopped."""

import all as all_pages
import pytest
from support.scripts import runnable


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(*words) → its exit code; run.calls: what was run; run.codes: how a page ends (0 where it isn't named)."""

    def run(*words):
        monkeypatch.setattr("sys.argv", ["all.py", *words])
        run.calls.clear()
        return all_pages.main()

    def call(page, words):
        run.calls.append((page, *words))
        if run.codes.get(page) == "stopped":
            raise KeyboardInterrupt
        return run.codes.get(page, 0)

    run.calls, run.codes = [], {}
    monkeypatch.setattr(all_pages, "call", call)
    monkeypatch.setattr(all_pages, "DONE", tmp_path / "runs" / "all.json")
    return run


def test_no_page_is_forgotten():
    """Nor is one named that there isn't."""
    named = {*all_pages.FIRST, *all_pages.LAST, *all_pages.NO_PAGES, *all_pages.RESUMES, all_pages.NEEDS_PYTHON}
    assert named <= {*runnable("benchmarks")}
    assert all_pages.in_order(["attention", "new", "step", "all"]) == ["step", "new", "attention"]
    assert {"decode_baselines", "step", "attention"} < {*all_pages.PAGES}


def test_a_stopped_run_goes_on(run):
    run.codes["favor"] = "stopped"
    with pytest.raises(KeyboardInterrupt):
        run("step", "favor", "attention")
    assert run.calls == [("step",), ("favor",)]
    run.codes.clear()
    assert run("step", "favor", "attention") == 0
    assert run.calls == [("favor", "--resume"), ("attention",)]
    assert run("step") == 0  # all was done, so this is a new run
    assert run.calls == [("step",)]


def test_a_failure_stops_no_other_page_and_baselines_need_an_environment(run, capsys):
    run.codes["step"] = 1
    assert run("step", "decode", "decode_baselines") == 1
    assert run.calls == [("step",), ("decode",)]
    assert "failed: step" in capsys.readouterr().err
    assert run("--anew", "decode_baselines", "--python", "e/bin/python", "--quick") == 0
    assert run.calls == [("decode_baselines", "--quick", "--python", "e/bin/python")]
    with pytest.raises(SystemExit):
        run("nonsense")
