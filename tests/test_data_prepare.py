"""Preparing: the same tokens from any number of processes and attempts, documents kept, and `jaxgpt data`."""

import json
import os
import re
import shutil
import signal

import numpy as np
import pytest

from jaxgpt.cli import main
from jaxgpt.data import megatron, open_dataset, open_mixture, prepare, scan, sources
from jaxgpt.data.tokenizer import END_OF_TEXT, BytesTokenizer, train_bpe
from jaxgpt.data.workers import Workers
from jaxgpt.errors import UserError

WORDS = "the cat sat on the mat; a dog (été 漢字) ate 12 apples\n"


@pytest.fixture
def corpus(tmp_path):
    """A folder with a long text, some short ones, and a JSONL file."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "long.txt").write_text("".join(f"{i} {WORDS}" for i in range(400)), encoding="utf-8")
    for i in range(5):
        (folder / f"{i}.txt").write_text(f"file {i}: {WORDS}", encoding="utf-8")
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": f"{i}: {WORDS}"}) + "\n" for i in range(90)))
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small(monkeypatch):
    """Units of a thousand bytes."""
    monkeypatch.setattr(prepare, "UNIT", 1000)
    monkeypatch.setattr(scan, "PIECE", 1000)


def prepared(corpus, *flags):
    assert main(["data", "prepare", "--data", str(corpus), "--out", "out", "--vocab", "300", *flags]) == 0


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents(indexed, tokenizer):
    starts = indexed.documents.start(np.arange(indexed.documents.count)).tolist()
    stops = [*starts[1:], len(indexed.tokens)]
    return [tokenizer.decode(indexed.tokens[a:b]) for a, b in zip(starts, stops, strict=True)]


# Tokens


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_documents_are_kept_and_their_tokens_are_those_of_the_text(corpus, here, small, tokenizer):
    source = sources.find_documents(str(corpus))
    whole = sources.whole(source)
    made = BytesTokenizer() if tokenizer == "bytes" else train_bpe(sources.texts(whole), 300)
    folder = here / "made"
    folder.mkdir()
    made.save(folder)
    counts = prepare.write(folder, {"all": whole}, made, np.dtype("<u2"))
    assert len(list((folder / "parts").glob("*.json"))) > 10
    found = megatron.read(folder / "all")
    texts = ["".join(text for text, _ in sources.read(span)) for span in whole if span.file.form.kind == "text"]
    lines = [text for span in whole if span.file.form.kind == "jsonl" for text, _ in sources.read(span)]
    end = END_OF_TEXT if tokenizer == "bpe" else "\n\n"
    # the last one of all, if it is a text file's, has no end
    open_ended = whole[-1].file.form.kind == "text" and texts[-1]
    assert sorted(documents(found, made)) == sorted(t if t == open_ended else t + end for t in texts + lines)
    assert counts == {"all": (len(found.tokens), len(texts) + len(lines))}
    pieces = [part for part, _ in prepare.encode_spans(whole, made)]
    np.testing.assert_array_equal(found.tokens, np.concatenate(pieces))


def test_any_number_of_processes_and_any_size_of_units_makes_the_same_files(corpus, here, monkeypatch, capsys):
    prepared(corpus, "--workers", "1")
    one = contents(here / "out")
    assert set(one) == {
        *("manifest.json", "tokenizer.json", "train.bin", "train.idx", "validation.bin", "validation.idx")
    }
    shutil.rmtree(here / "out")
    monkeypatch.setattr(prepare, "UNIT", 1000)
    prepared(corpus, "--workers", "2")
    assert contents(here / "out") == one
    assert not (here / "out.partial").exists()
    said = capsys.readouterr().out
    assert "encoded" in said
    assert re.search(r"train +\d+ documents, [\d,]+ tokens, \d\.\d+ bytes a token", said)


def test_what_was_cut_off_is_gone_on_with(corpus, here, small, monkeypatch):
    prepared(corpus, "--workers", "1")
    whole = contents(here / "out")
    shutil.rmtree(here / "out")
    real, encoded = prepare._encode, []

    def failing(unit):
        if len(encoded) == 7:
            raise KeyboardInterrupt
        encoded.append(unit.part.name)
        real(unit)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_encode", failing)
        assert (
            main(["data", "prepare", "--data", str(corpus), "--out", "out", "--vocab", "300", "--workers", "1"]) == 130
        )
    parts = here / "out.partial" / "parts"
    assert len(list(parts.glob("*.json"))) == 7
    damaged = parts / "00000003.bin"
    damaged.write_bytes(damaged.read_bytes()[:-2] + b"xx")
    (parts / "00000004.lengths").unlink()
    again = []
    monkeypatch.setattr(prepare, "_encode", lambda unit: (again.append(unit.part.name), real(unit)))
    prepared(corpus, "--workers", "1")
    assert not set(again) & (set(encoded) - {"00000003", "00000004"})
    assert {"00000003", "00000004"} < set(again)
    assert contents(here / "out") == whole


def test_the_same_again_is_there_and_other_data_is_refused(corpus, here, capsys):
    prepared(corpus)
    before = {path: path.stat().st_mtime_ns for path in (here / "out").iterdir()}
    prepared(corpus)
    assert {path: path.stat().st_mtime_ns for path in (here / "out").iterdir()} == before
    capsys.readouterr()
    assert main(["data", "prepare", "--data", str(corpus), "--out", "out", "--tokenizer", "bytes"]) == 2
    assert "--out out: is there already" in capsys.readouterr().err
    (here / "other.partial").mkdir()
    (here / "other.partial" / ".plan").write_text("another")
    assert main(["data", "prepare", "--data", str(corpus), "--out", "other"]) == 2
    assert "holds the unfinished preparation of other data" in capsys.readouterr().err


# Opened by training


def test_a_prepared_folder_is_data(corpus, here):
    prepared(corpus)
    ours = open_mixture("out", "bpe", 300, 0.05)
    theirs = open_dataset(str(corpus), "bpe", 300, 0.05, here / "cache")
    np.testing.assert_array_equal(ours.datasets[0].train, theirs.train)
    assert ours.fingerprint == theirs.fingerprint
    assert ours.tokenizer.fingerprint() == theirs.tokenizer.fingerprint()
    with pytest.raises(UserError, match="was prepared with another tokenizer"):
        open_mixture("out", "bytes", 300, 0.05)
    with pytest.raises(UserError, match="--vocab 260: tokenizer bpe-300 has 300 entries"):
        open_mixture("out", "bpe", 260, 0.05)
    os.truncate("out/train.idx", 40)
    with pytest.raises(UserError, match=r"train\.idx: damaged token store"):
        open_mixture("out", "bpe", 300, 0.05)


def test_megatrons_files_are_data(here):
    megatron.write(here / "m", [np.frombuffer(WORDS.encode(), np.uint8)] * 40, 256)
    for name in ("m", "m.bin", "m.idx"):
        found = open_mixture(name, "bytes", 256, 0.25)
        assert found.tokenizer.decode(np.concatenate([found.datasets[0].train, *found.validation])) == WORDS * 40
        assert found.validation_bytes is None
    with pytest.raises(UserError, match="hold tokens without their tokenizer; give --tokenizer"):
        open_mixture("m", "bpe", 300, 0.25)
    megatron.write(here / "strange", [np.array([7, 300] * 40)], 400)
    with pytest.raises(UserError, match="token 300 is outside of the 256 entries of tokenizer bytes"):
        open_mixture("strange", "bytes", 256, 0.25).batch(8, 0, np.arange(4))


# The other verbs


def test_inspect(corpus, here, capsys):
    prepared(corpus)
    capsys.readouterr()
    assert main(["data", "inspect", "out"]) == 0
    said = capsys.readouterr().out
    assert all(
        word in said for word in ("documents", "bytes a token", "checksum", "validation", "--- document", "cat sat")
    )
    assert main(["data", "inspect", "out/train.bin", "--tokenizer", "out", "--documents", "1"]) == 0
    said = capsys.readouterr().out
    assert said.count("--- document") == 1
    assert "cat sat" in said
    assert main(["data", "inspect", str(corpus), "--documents", "2"]) == 0
    assert "96 documents" in capsys.readouterr().out


def test_blend(corpus, here, capsys):
    blended = f"0.75:{corpus}/long.txt,0.25:{corpus}/lines.jsonl"
    flags = ["--tokenizer", "bytes", "--vocab", "256", "--seq", "16", "--samples", "1000"]
    assert main(["data", "blend", "--data", blended, *flags]) == 0
    first = capsys.readouterr().out
    assert re.search(r"long\.txt +0\.75 .* 750 ", first)
    assert re.search(r"lines\.jsonl +0\.25 .* 250 ", first)
    assert main(["data", "blend", "--data", blended, *flags, "--seed", "1"]) == 0
    assert first.splitlines()[-1] != capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["prepar"], "data prepar: no such verb; did you mean prepare?"),
        (["prepare", "--out", "o"], "--data"),
        (["prepare", "--data", "0.5:a,0.5:b", "--out", "o"], "is a blend"),
        (["prepare", "--data", "none", "--out", "o"], "no such file or folder"),
        (["prepare", "--data", "none", "--out", "o", "--workers", "0"], "--workers 0: must be at least 1"),
        (["inspect", "none"], "no such file or folder"),
        (["prepare", "--data", "none", "--out", "o", "--vocab", "0"], "--vocab 0: must be at least 1"),
        (["prepare", "--data", __file__, "--out", "/proc/o"], "--out /proc/o: /proc/o.partial cannot be made"),
        (["blend", "--data", "1:none", "--seq", "0"], "--seq 0: must be at least 1"),
        (["blend", "--data", "1:none", "--seed", "-1"], "--seed -1: must be at least 0 and below 2^64"),
        (["blend", "--data", "1:none", "--samples", str(10**12)], "must be at least 1 and at most 100000000"),
    ],
)
def test_one_line(here, capsys, args, says):
    assert main(["data", *args]) == 2
    line = capsys.readouterr().err
    assert says in line
    assert line.count("\n") == 1


def test_help(capsys):
    assert main(["data"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {verb} " in out for verb in ("prepare", "inspect", "blend"))


# Workers


def test_workers_answer_in_order_and_keep_a_bugs_traceback(capfd):
    with Workers(2) as workers:
        assert list(workers.map(len, ["a", "", "ccc"])) == [1, 0, 3]
    with Workers(2) as workers, pytest.raises(RuntimeError, match="a worker of data preparation has ended"):
        list(workers.map(len, [7]))
    assert "TypeError" in capfd.readouterr().err


def test_what_the_system_does_to_a_worker_is_one_line(tmp_path, capfd):
    with Workers(2) as workers, pytest.raises(UserError, match=r"was ended by signal 9 .*give the same command again"):
        list(workers.map(signal.raise_signal, [signal.SIGKILL]))
    with Workers(2) as workers, pytest.raises(UserError, match=f"{tmp_path}: Is a directory"):
        list(workers.map(os.remove, [tmp_path]))
    assert capfd.readouterr().err == ""
