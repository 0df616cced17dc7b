"""Where text may come from, and the sentence for each way in which it does not."""

import io
import json
import sys

import pytest

from tarnn.data import CORPORA, read_documents
from tarnn.errors import UserError


def read(*sources, **options):
    return [(document.name, document.data) for document in read_documents(sources, **options)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"bee")
    (tmp_path / "a.txt").write_bytes(b"\xff\x01a")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    (tmp_path / "sub" / ".git" / "x").write_bytes(b"no")
    (tmp_path / "sub" / "c.md").write_bytes(b"sea")
    return tmp_path


def test_file_folder_and_glob(folder):
    assert read(str(folder / "a.txt")) == [(str(folder / "a.txt"), b"\xff\x01a")]
    assert [data for _, data in read(str(folder))] == [b"\xff\x01a", b"bee", b"sea"]
    assert [data for _, data in read(str(folder / "*.txt"))] == [b"\xff\x01a", b"bee"]
    assert [data for _, data in read(str(folder / "**" / "*.md"))] == [b"sea"]
    assert [data for _, data in read(str(folder / "b.txt"), str(folder / "sub"))] == [b"bee", b"sea"]


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped \xff")))
    assert read("-") == [("standard input", b"piped \xff")]


def test_jsonl_reads_the_named_field_line_by_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "é", "n": 1}) + "\n\n" + json.dumps({"text": "", "n": 2}) + "\n")
    assert read(str(path)) == [(f"{path}, line 1", "é".encode()), (f"{path}, line 3", b"")]
    path.write_text('{"body": "x"}')
    assert [data for _, data in read(str(path), text_field="body")] == [b"x"]


def test_a_dataset_on_disk(tmp_path, tmp_path_factory, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [data for _, data in read(f"datasets:{tmp_path}")] == [b"one", b"two"]
    assert [data for _, data in read(f"datasets:{tmp_path}::train[1:]")] == [b"two"]
    with pytest.raises(UserError, match=r"row 0 has no field 'body', only 'text'; .* --text-field"):
        read(f"datasets:{tmp_path}", text_field="body")


def test_built_in_corpora_are_sorted_and_large_enough():
    documents = list(CORPORA["python-docs"]())
    assert [name for name, _ in documents] == sorted(name for name, _ in documents)
    assert sum(len(data) for _, data in documents) > 200_000
    names = [name for name, _ in CORPORA["python-stdlib"]()]
    assert "argparse.py" in names
    assert not any("site-packages" in name or name.startswith("test/") for name in names)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "rows.jsonl is empty"),
        (b'{"text": "a"}\nnot json\n', "rows.jsonl, line 2 is not JSON"),
        (b'["text"]', "line 1 holds a JSON list; expected an object"),
        (b'{"txt": "a"}', "line 1 has no field 'text', only 'txt'"),
        (b'{"text": 3}', "line 1 has a int where the text was expected"),
        (b'{"text": "\\ud800"}', "line 1 is not text: .*surrogate"),
    ],
)
def test_jsonl_that_cannot_be_read(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(str(tmp_path / "rows.jsonl"))


def test_sources_that_are_not_there(folder, tmp_path):
    with pytest.raises(UserError, match="no text was given; expected a file, a folder"):
        read()
    with pytest.raises(UserError, match=r"python-dox: no such file.*Did you mean .*'python-docs'\?"):
        read("python-dox")
    with pytest.raises(UserError, match=r"glob '.*\*\.rst' has no files with text"):
        read(str(folder / "*.rst"))
    with pytest.raises(UserError, match=r"empty\.txt is empty"):
        read(str(folder / "empty.txt"))
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match=r"folder .*bare has no files with text"):
        read(str(tmp_path / "bare"))
    with pytest.raises(UserError, match=r"does not name a dataset"):
        read("datasets:")


def test_csv_reads_the_named_column(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffn,text\n1,"one, and\ntwo"\n\n2,three\n', encoding="utf-8")
    assert read(str(path)) == [(f"{path}, line 3", b"one, and\ntwo"), (f"{path}, line 5", b"three")]
    for content, message in (
        ("n,body\n1,x\n", r"line 2 has no field 'text', only 'n', 'body'; .* --text-field"),
        ("n,text\n1\n", "line 2 has another number of values than the 2 columns of the header"),
        ('n,text\n1,"x\n', "is no row of a .csv file"),
        ("n,text\n", "is empty; expected a row"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            read(str(path))


def test_what_lies_about_a_text_is_no_text(folder):
    for name in ("README.md", "LICENSE", "readme", "License.txt", "CHANGELOG.rst"):
        (folder / name).write_text("about")
    (folder / ".notes.txt").write_text("hidden")
    assert [data for _, data in read(str(folder))] == [b"\xff\x01a", b"bee", b"sea"]
    assert b"hidden" not in [data for _, data in read(str(folder / "*.txt"))]
    assert read(str(folder / "README.md")) == [(str(folder / "README.md"), b"about")]
    alone = folder / "alone"
    alone.mkdir()
    (alone / "README").write_text("about")
    assert [data for _, data in read(str(alone))] == [b"about"]


def test_a_dataset_that_is_away_fails_at_once(monkeypatch):
    datasets = pytest.importorskip("datasets")
    tried = []

    def load_dataset(*args, **options):
        tried.append(datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError("not in the cache")

    def no_way(address, timeout):
        tried.append(address)
        raise OSError("unreachable")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("tarnn.data.sources.getproxies", dict)
    monkeypatch.setattr("tarnn.data.sources.socket.create_connection", no_way)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    before = datasets.config.HF_HUB_OFFLINE
    with pytest.raises(UserError, match=r"is not on this machine, and the Hugging Face Hub can't be reached"):
        read("datasets:nobody/nothing")
    assert tried == [("huggingface.co", 443), True]
    assert datasets.config.HF_HUB_OFFLINE is before
