"""Files of every format and compression: the same documents from each, and one line for what is wrong with one."""

import gzip
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from jaxgpt.data import scan, sources
from jaxgpt.data.workers import Workers
from jaxgpt.errors import UserError

TEXTS = ["one", "two\nlines é", "", "漢字 🙂", "last"]
WRITTEN = [text for text in TEXTS if text]


def jsonl(texts=TEXTS, field="text"):
    return "".join(json.dumps({"id": i, field: text}, ensure_ascii=i % 2 > 0) + "\n" for i, text in enumerate(texts))


def parquet(path, texts=TEXTS, field="text", kind=None, groups=2):
    kind = kind or pa.string()
    table = pa.table({"id": list(range(len(texts))), field: pa.array(texts, kind)})
    pq.write_table(table, path, row_group_size=-(-len(texts) // groups), write_page_checksum=True, compression="none")
    return path


def compress(path, content, suffix):
    if suffix == ".gz":
        content = gzip.compress(content)
    elif suffix == ".zst":
        content = zstandard.compress(content)
    path = path.with_name(path.name + suffix)
    path.write_bytes(content)
    return path


def documents(data, run=map):
    source = sources.find_documents(str(data), run)
    found = [text for span in sources.whole(source) for text, _ in sources.read(span)]
    assert source.size == sum(len(text.encode()) for text in found)
    return found


def refused(data):
    with pytest.raises(UserError) as caught:
        sources.find_documents(str(data))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is read


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_the_same_documents_from_every_format(tmp_path, suffix):
    lines = compress(tmp_path / "a.jsonl", jsonl().encode(), suffix)
    assert documents(lines) == WRITTEN
    table = parquet(tmp_path / "whole")
    assert documents(compress(tmp_path / "b.parquet", table.read_bytes(), suffix)) == WRITTEN
    text = compress(tmp_path / "c.txt", "é\n漢".encode() * 100_000, suffix)
    assert "".join(documents(text)) == "é\n漢" * 100_000
    table.unlink()
    source = sources.find_documents(str(tmp_path))
    assert (len(source.files), source.documents) == (3, 9)
    assert source.describe().endswith(f"3 files, {source.size:,} bytes in 9 documents")


def test_a_named_field(tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl(field="content"))
    parquet(tmp_path / "b.parquet", field="content")
    assert documents(f"{tmp_path}/a.jsonl#content") == documents(f"{tmp_path}/b.parquet#content") == WRITTEN
    assert len(documents(f"{tmp_path}#content")) == 2 * len(WRITTEN)
    (tmp_path / "a#b").write_text("text")
    assert documents(tmp_path / "a#b") == ["text"]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_columns_of_other_kinds_of_text_and_nulls(tmp_path, kind):
    assert documents(parquet(tmp_path / "a.parquet", ["x", None, "x", "y"], kind=kind)) == ["x", "x", "y"]


def test_compressed_in_several_members(tmp_path):
    half = jsonl(WRITTEN[:2]).encode(), jsonl(WRITTEN[2:]).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, half)))
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, half)))
    assert documents(tmp_path / "a.jsonl.gz") == documents(tmp_path / "b.jsonl.zst") == WRITTEN


def test_a_large_file_is_read_in_pieces_by_any_number_of_processes(tmp_path, monkeypatch):
    texts = [f"{i} " + "x" * (i % 50) for i in range(500)]
    (tmp_path / "a.jsonl").write_text(jsonl(texts))
    whole = sources.find_documents(str(tmp_path / "a.jsonl"))
    monkeypatch.setattr(scan, "PIECE", 1000)
    with Workers(2) as workers:
        divided = sources.find_documents(str(tmp_path / "a.jsonl"), workers.map)
        assert documents(tmp_path / "a.jsonl", workers.map) == texts
    assert len(whole.files[0].pieces) == 1
    assert len(divided.files[0].pieces) > 20
    assert divided.documents == whole.documents == 500


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_the_cut_is_between_documents(tmp_path, name, share, monkeypatch):
    monkeypatch.setattr(scan, "PIECE", 1000)
    texts = [f"{i} " + "x" * (i % 50) for i in range(300)]
    if name == "a.parquet":
        parquet(tmp_path / name, texts, groups=7)
    else:
        compress(tmp_path / "a.jsonl", jsonl(texts).encode(), name.removeprefix("a.jsonl"))
    source = sources.find_documents(str(tmp_path / name))
    train, held_out = sources.split(source, share)
    found = [[text for span in part for text, _ in sources.read(span)] for part in (train, held_out)]
    assert found[0] + found[1] == texts
    size = sum(span.size for span in train)
    assert size == sum(map(len, found[0]))
    assert 0 <= size - int(source.size * (1 - share)) < 60


# What is refused


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{broken", "not JSON (Expecting property name"),
        (b"[" * 200_000, "not JSON (maximum recursion depth"),
        (b'["a"]', "not a JSON object"),
        (b'{"body": "x", "id": 3}', 'no field "text"; its fields are body, id; name one as PATH#FIELD'),
        (b'{"text": 7}', 'field "text" is 7, not text'),
        (b'{"text": "caf\xe9"}', "not UTF-8 at its byte 13"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_bad_line_is_named_with_file_and_number(tmp_path, line, says, suffix, monkeypatch):
    monkeypatch.setattr(scan, "PIECE", 64)  # in the middle of the file, too
    content = jsonl(["fine"] * 20).encode() + b"\n" + line + b"\n" + jsonl().encode()
    path = compress(tmp_path / "a.jsonl", content, suffix)
    message = refused(path)
    assert message.startswith(f"{path}, line 22: ")
    assert says in message


def test_an_error_comes_back_from_another_process(tmp_path):
    (tmp_path / "a.jsonl").write_text("{")
    with Workers(2) as workers, pytest.raises(UserError, match=r"a\.jsonl, line 1: not JSON"):
        sources.find_documents(str(tmp_path / "a.jsonl"), workers.map)


def test_columns_that_are_not_there_or_no_text(tmp_path):
    path = parquet(tmp_path / "a.parquet", field="body")
    assert 'no column "text"; its columns are id, body; name one as PATH#COLUMN' in refused(path)
    assert 'column "id" is of type int64, not text' in refused(f"{path}#id")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_that_are_cut_off_or_something_else(tmp_path, suffix):
    path = compress(tmp_path / "a.txt", b"some text that is long enough\n" * 1000, suffix)
    whole = path.read_bytes()
    for size in (5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert refused(path).startswith(f"{path}: not a whole {'gzip' if suffix == '.gz' else 'zstd'} file (")
    path.write_bytes(b"plain text")
    assert f"{path}: not a whole" in refused(path)


def test_parquet_files_that_are_cut_off_or_something_else(tmp_path):
    path = parquet(tmp_path / "a.parquet")
    path.write_bytes(path.read_bytes()[:-10])
    assert refused(path).startswith(f"{path}: not a whole Parquet file (")
    path.write_text("plain text")
    assert refused(path).startswith(f"{path}: not a whole Parquet file (")


def test_a_damaged_row_group_is_named(tmp_path):
    path = parquet(tmp_path / "a.parquet", [f"text {i}" * 50 for i in range(100)])
    content = path.read_bytes()
    middle = content.index(b"text 7")
    path.write_bytes(content[:middle] + b"next" + content[middle + 4 :])
    assert f"{path}: row group 0 cannot be read" in refused(path)


def test_only_empty_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl(["", ""]))
    assert "the file is empty" in refused(tmp_path / "a.jsonl")


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")])
def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    message = refused(tmp_path / name)
    assert message == f"{tmp_path / name}: reading it needs {package}; pip install 'jaxgpt[data]' brings it"


def test_a_file_that_changes_between_finding_and_reading(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(jsonl())
    (span,) = sources.whole(sources.find_documents(str(path)))
    path.write_text(jsonl(["other", "texts", "now"]))
    with pytest.raises(UserError, match="changed while it was read"):
        list(sources.read(span))
