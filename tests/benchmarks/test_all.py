"""All pages in one run: a failure stops no other page."""

import all as all_pages
import pytest
from support.scripts import runnable


def test_a_failure_stops_no_other_page_and_baselines_need_an_environment(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(all_pages, "call", lambda page, words: calls.append((page, *words)) or page == "step")

    def run(*words):
        calls.clear()
        monkeypatch.setattr("sys.argv", ["all.py", *words])
        return all_pages.main()

    assert run("decode", "step", "decode_baselines") == 1
    assert calls == [("step",), ("decode",)]
    assert "failed: step" in capsys.readouterr().err
    assert run("decode_baselines", "--python", "e/bin/python", "--quick") == 0
    assert calls == [("decode_baselines", "--quick", "--python", "e/bin/python")]
    with pytest.raises(SystemExit):
        run("nonsense")
    assert {*all_pages.PAGES, "all"} == set(runnable("benchmarks"))
