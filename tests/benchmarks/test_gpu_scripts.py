"""The scripts that measure on a GPU go through everything on a CPU too, so that a mistake shows before a GPU is there."""

import pytest


@pytest.mark.parametrize(
    ("name", "columns"),
    [("gpu_attention", "| tarnn | plain PyTorch | SDPA |"), ("gpu_decode", "| linear attention | softmax")],
)
def test_a_dry_run_fills_each_cell(script, data_of, folder, name, columns):
    code, out, _ = script(name, "--dry-run", "--quick")
    assert code == 0
    (rows,) = data_of(name)["results"].values()
    assert rows
    assert all(x is not None for row in rows for x in row.values())
    page = (folder / f"{name}.md").read_text()
    assert "A dry run on a CPU" in page
    assert columns in page
    assert out.count("dry_run")


@pytest.mark.parametrize("name", ["gpu_attention", "gpu_decode"])
def test_without_a_gpu_the_page_says_so(script, folder, name, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert script(name, "--quick").code == 0
    assert "Not measured on a GPU" in (folder / f"{name}.md").read_text()
