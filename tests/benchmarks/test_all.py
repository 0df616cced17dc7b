"""All pages in one run, which goes on where it was stopped."""

import all as all_pages
import pytest
from support.scripts import runnable


def test_no_page_is_forgotten():
    """Nor is one named that there isn't."""
    named = {*all_pages.FIRST, *all_pages.LAST, *all_pages.NO_PAGES, *all_pages.RESUMES, all_pages.NEEDS_PYTHON}
    assert named <= {*runnable("benchmarks")}
    assert all_pages.in_order(["attention", "summary", "new", "step", "all"]) == ["step", "new", "attention"]
    assert {"decode_baselines", "step", "attention"} < {*all_pages.PAGES}


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """What was run; `calls.codes` says how each ends (0), or raises."""
    made = type("Calls", (list,), {"codes": {}})()

    def call(page, words):
        made.append((page, *words))
        if made.codes.get(page) == "stopped":
            raise KeyboardInterrupt
        return made.codes.get(page, 0)

    monkeypatch.setattr(all_pages, "call", call)
    monkeypatch.setattr(all_pages, "DONE", tmp_path / "runs" / "all.json")
    return made


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["all.py", *words])
    return all_pages.main()


def test_a_stopped_run_goes_on(calls, monkeypatch):
    calls.codes["favor"] = "stopped"
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, "step", "favor", "attention")
    assert calls == [("step",), ("favor",)]
    calls.codes.clear()
    calls.clear()
    assert run(monkeypatch, "step", "favor", "attention") == 0
    assert calls == [("favor", "--resume"), ("attention",)]
    calls.clear()
    assert run(monkeypatch, "step") == 0  # all was done, so this is a new run
    assert calls == [("step",)]


def test_a_failure_stops_no_other_page(calls, monkeypatch, capsys):
    calls.codes["step"] = 1
    assert run(monkeypatch, "step", "decode") == 1
    assert calls == [("step",), ("decode",)]
    assert "failed: step" in capsys.readouterr().err
    calls.clear()
    assert run(monkeypatch, "--anew", "step", "decode") == 1
    assert calls == [("step",), ("decode",)]


def test_baselines_need_an_environment(calls, monkeypatch):
    assert run(monkeypatch, "step", "decode_baselines") == 0
    assert run(monkeypatch, "decode_baselines", "--python", "e/bin/python", "--quick") == 0
    assert calls == [("step",), ("decode_baselines", "--quick", "--python", "e/bin/python")]
    with pytest.raises(SystemExit):
        run(monkeypatch, "nonsense")
