"""The experiment with encoder–decoders: a quick run, which goes on."""

import re


def test_a_quick_run_goes_on(script, data_of, tmp_path):
    words = [f"{a}{b}{c} {a} {c}" for a in "AB" for b in "CDE" for c in "FG"]
    (tmp_path / "an4.dic").write_text("\n".join(words) + "\nAC(2) A\n")
    options = ("seq2seq", "--quick", "--data", tmp_path, "--runs", tmp_path / "runs")
    first = script(*options)
    assert first.code == 0, first.err
    found = data_of("seq2seq")["results"]
    assert set(found["tasks"]) == {"phones", "reversed", "sorted"}
    assert found["bytes"]["linear 8"] == found["bytes"]["linear 16"]
    assert found["bytes"]["softmax 8"] < found["bytes"]["softmax 16"]
    assert len(re.findall(r"step': \d", first.out)) == 18
    assert not re.findall(r"step': \d", script(*options).out)
    assert data_of("seq2seq")["results"]["tasks"] == found["tasks"]
