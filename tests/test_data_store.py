"""The token store: made once, the parts apart, damage and full disks told, nothing lost."""

import errno
import json
import os
import shutil

import numpy as np
import pytest

from jaxgpt.data import build, cache_folder, checksums, open_dataset, open_text
from jaxgpt.data.tokenizer import END_OF_TEXT, BytesTokenizer, CharsTokenizer, train_bpe
from jaxgpt.errors import UserError

WORDS = "the cat sat on the mat; a dog (été 漢字) ate 12 apples\n"


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "texts"
    for i in range(12):
        path = folder / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {i}: " + WORDS * (i + 3), encoding="utf-8")
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def stores(cache):
    return sorted((cache / "tokens").iterdir())


def refused(*arguments, **named):
    with pytest.raises(UserError) as caught:
        open_dataset(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is stored


@pytest.mark.parametrize(("tokenizer", "vocab"), [("bytes", 256), ("chars", 100), ("bpe", 320)])
def test_both_parts_together_are_the_whole_text(corpus, cache, tokenizer, vocab):
    dataset = open_dataset(str(corpus), tokenizer, vocab, 0.2, cache)
    assert dataset.train.dtype == dataset.validation.dtype == np.uint16
    boundary = dataset.tokenizer.boundary
    text = dataset.tokenizer.decode(dataset.train) + dataset.tokenizer.decode(dataset.validation)
    names = [file["name"] for file in dataset.manifest["files"]]
    assert sorted(names) == sorted(path.relative_to(corpus).as_posix() for path in corpus.rglob("*.txt"))
    assert text == boundary.join((corpus / name).read_text(encoding="utf-8") for name in names)
    held_out = dataset.tokenizer.decode(dataset.validation).replace(END_OF_TEXT, "")
    assert dataset.validation_bytes == len(held_out.encode())
    assert abs(dataset.validation_bytes / len(text.encode()) - 0.2) < 0.02
    assert boundary == (END_OF_TEXT if tokenizer == "bpe" else "\n\n")


def test_the_manifest_says_what_is_there(corpus, cache):
    manifest = open_dataset(str(corpus), "bpe", 290, 0.2, cache).manifest
    assert manifest["source"].startswith(f"{corpus}: 12 files, ")
    sizes = {path.relative_to(corpus).as_posix(): path.stat().st_size for path in corpus.rglob("*.txt")}
    assert {file["name"]: file["bytes"] for file in manifest["files"]} == sizes
    assert sum(manifest["bytes"].values()) == sum(sizes.values())
    trained_on = manifest["bytes"]["train"]
    assert manifest["tokenizer"] == {"name": "bpe-290", "entries": 290, "trained_on_bytes": trained_on}
    (folder,) = stores(cache)
    assert manifest["folder"] == str(folder)
    assert set(manifest["checksums"]) == {
        "train.bin",
        "train.idx",
        "validation.bin",
        "validation.idx",
        "tokenizer.json",
    }
    assert (folder / "train.bin").stat().st_size == 2 * manifest["tokens"]["train"]


def test_one_file_has_no_boundary_and_is_cut_at_its_share(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text("0123456789" * 10)
    dataset = open_dataset(str(path), "chars", 10, 0.1, cache)
    assert (len(dataset.train), len(dataset.validation), dataset.validation_bytes) == (90, 10, 10)
    assert dataset.tokenizer.size == 10


def test_a_large_vocabulary_takes_four_bytes(corpus, cache):
    dataset = open_dataset(str(corpus), "bytes", 65_500, 0.2, cache)
    assert dataset.train.dtype == np.int32
    assert open_dataset(str(corpus), "bytes", 65_499, 0.2, cache).train.dtype == np.uint16


def test_a_bpe_has_not_seen_the_validation_text(tmp_path, cache):
    path = tmp_path / "a.txt"
    train = WORDS * 50
    tokenizers = []
    for tail in ("zq" * 150, "jx" * 150):
        path.write_text(train + tail, encoding="utf-8")
        share = len(tail.encode()) / len((train + tail).encode())
        dataset = open_dataset(str(path), "bpe", 300, share, cache)
        assert dataset.tokenizer.decode(dataset.validation) == tail
        tokenizers.append(dataset.tokenizer.fingerprint())
    assert tokenizers[0] == tokenizers[1]


def test_a_bpe_is_trained_on_a_share_of_a_large_corpus(corpus, cache, monkeypatch):
    monkeypatch.setattr(build, "_BPE_BYTES", 2)
    used = open_dataset(str(corpus), "bpe", 300, 0.2, cache).manifest["tokenizer"]["trained_on_bytes"]
    monkeypatch.setattr(build, "_BPE_BYTES", 2**13)
    size = open_dataset(str(corpus), "bpe", 301, 0.2, cache).manifest["tokenizer"]["trained_on_bytes"]
    # 4096 bytes are asked for, in whole pieces.
    assert 0 < used < size
    assert 2000 < used < 6500


def test_a_text_in_many_pieces_has_the_tokens_of_the_whole(tmp_path, cache):
    path = tmp_path / "a.txt"
    text = WORDS * 15_000
    path.write_text(text, encoding="utf-8")
    tokenizer = train_bpe(iter([WORDS]), 300)
    assert path.stat().st_size > 3 * 2**18
    found = open_text(str(path), tokenizer)
    np.testing.assert_array_equal(found.tokens, tokenizer.encode(text))
    assert found.bytes == len(text.encode())


# Stored once


def test_the_second_opening_reads_what_the_first_stored(corpus, cache):
    told = []
    first = open_dataset(str(corpus), "bpe", 300, 0.2, cache, told.append)
    assert told
    (folder,) = stores(cache)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    told.clear()
    second = open_dataset(str(corpus), "bpe", 300, 0.2, cache, told.append)
    assert told == []
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.validation, second.validation)
    assert first.manifest == second.manifest
    assert first.tokenizer.fingerprint() == second.tokenizer.fingerprint()


def test_the_same_text_elsewhere_is_the_same_store(corpus, cache, tmp_path):
    open_dataset(str(corpus), "bytes", 256, 0.2, cache)
    moved = shutil.copytree(corpus, tmp_path / "moved")
    dataset = open_dataset(str(moved), "bytes", 256, 0.2, cache)
    assert len(stores(cache)) == 1
    assert dataset.manifest["source"].startswith(str(moved))


def test_whatever_determines_the_tokens_makes_another_store(corpus, cache, tmp_path):
    train_bpe(iter([WORDS]), 280).save(tmp_path)
    own = str(tmp_path / "tokenizer.json")
    for arguments in (("bytes", 256, 0.2), ("bytes", 256, 0.3), ("bpe", 300, 0.2), ("bpe", 301, 0.2), (own, 301, 0.2)):
        open_dataset(str(corpus), *arguments, cache)
    train_bpe(iter(["other words"]), 280).save(tmp_path)
    open_dataset(str(corpus), own, 301, 0.2, cache)
    assert len(stores(cache)) == 6
    changed = corpus / "part0" / "0.txt"
    content = changed.read_text(encoding="utf-8")
    times = changed.stat()
    changed.write_text(content.replace("cat", "cow"), encoding="utf-8")
    # Same size and time: only the content tells.
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    dataset = open_dataset(str(corpus), "bytes", 256, 0.2, cache)
    assert len(stores(cache)) == 7
    assert "cow" in dataset.tokenizer.decode(dataset.train) + dataset.tokenizer.decode(dataset.validation)


def test_another_process_may_build_the_same_store_meanwhile(corpus, cache):
    inner = []

    def build_too(line):
        if line.startswith("encoding") and not inner:
            inner.append(open_dataset(str(corpus), "bytes", 256, 0.2, cache))

    outer = open_dataset(str(corpus), "bytes", 256, 0.2, cache, build_too)
    np.testing.assert_array_equal(outer.train, inner[0].train)
    assert len(stores(cache)) == 1


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("JAXGPT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert str(cache_folder()) == "/home/me/.cache/jaxgpt"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(cache_folder()) == "/xdg/jaxgpt"
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    (tmp_path / "a.txt").write_text("some text")
    open_dataset(str(tmp_path / "a.txt"), "bytes", 256, 0.5)
    assert len(stores(tmp_path / "own")) == 1


# Text of another corpus


def test_all_of_a_text_is_evaluated(corpus):
    found = open_text(str(corpus), BytesTokenizer())
    sizes = [path.stat().st_size for path in corpus.rglob("*.txt")]
    assert len(found.tokens) == found.bytes == sum(sizes) + 2 * 11
    assert found.tokens.dtype == np.uint16
    assert "12 files" in found.description


def test_text_that_the_tokenizer_cannot_spell(corpus):
    with pytest.raises(UserError, match="is not among the 2 that the chars tokenizer was made from"):
        open_text(str(corpus), CharsTokenizer("ab"))


# What is refused


def damage_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-2])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0\0")


def remove(path):
    path.unlink()


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("damage", [damage_byte, truncate, lengthen, remove])
def test_damage_is_named_and_nothing_is_deleted(corpus, cache, name, damage):
    open_dataset(str(corpus), "bpe", 300, 0.2, cache)
    (folder,) = stores(cache)
    damage(folder / name)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    message = refused(str(corpus), "bpe", 300, 0.2, cache)
    assert message.startswith(f"{folder / name}: damaged token store (")
    if damage in (truncate, lengthen) and name != "manifest.json":
        assert f"({(folder / name).stat().st_size} bytes in place of " in message
    assert message.endswith(f"delete the folder {folder} and run again")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    shutil.rmtree(folder)
    open_dataset(str(corpus), "bpe", 300, 0.2, cache)


def test_a_changed_count_in_the_manifest_is_damage(corpus, cache):
    open_dataset(str(corpus), "bytes", 256, 0.2, cache)
    path = stores(cache)[0] / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["bytes"]["validation"] += 1
    path.write_text(json.dumps(manifest))
    assert "its own checksum differs" in refused(str(corpus), "bytes", 256, 0.2, cache)
    path.write_text("[1]")
    assert "its own checksum differs" in refused(str(corpus), "bytes", 256, 0.2, cache)


def test_every_chunk_is_checked_up_to_the_limit_and_a_fair_share_beyond(corpus, cache, monkeypatch):
    monkeypatch.setattr(checksums, "CHUNK", 512)
    open_dataset(str(corpus), "bytes", 256, 0.2, cache)
    path = stores(cache)[0] / "train.bin"
    content = path.read_bytes()
    found = {128: 0, 8: 0}
    chunks = range(0, len(content), 512)
    assert 8 < len(chunks) < 128
    for limit in found:
        monkeypatch.setattr(checksums, "CHECKED", limit)
        for at in chunks:
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            try:
                open_dataset(str(corpus), "bytes", 256, 0.2, cache)
            except UserError as error:
                found[limit] += f"bytes at {at} differs" in str(error)
    assert found == {128: len(chunks), 8: 8}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_behind(corpus, cache, monkeypatch, code):
    def full(handle):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    message = refused(str(corpus), "bytes", 256, 0.2, cache)
    assert message.startswith(f"{cache / 'tokens'}: the disk is full; ")
    assert stores(cache) == []
    monkeypatch.undo()
    open_dataset(str(corpus), "bytes", 256, 0.2, cache)


def test_an_interrupted_build_leaves_nothing_behind(corpus, cache):
    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_dataset(str(corpus), "bytes", 256, 0.2, cache, interrupt)
    assert stores(cache) == []


def test_a_cache_that_is_no_folder(corpus, tmp_path):
    (tmp_path / "file").write_text("x")
    message = refused(str(corpus), "bytes", 256, 0.2, tmp_path / "file")
    assert "the token cache cannot be used (Not a directory); set JAXGPT_CACHE" in message


def test_tokenizers_larger_than_the_vocabulary_store_nothing(corpus, cache, tmp_path):
    train_bpe(iter([WORDS]), 290).save(tmp_path)
    own = str(tmp_path / "tokenizer.json")
    for tokenizer, vocab, name, entries in (
        ("bytes", 255, "bytes", 256),
        ("chars", 10, "chars", len(set(WORDS + "file: 0123456789"))),
        (own, 280, "bpe-290", 290),
    ):
        message = refused(str(corpus), tokenizer, vocab, 0.2, cache)
        assert message.startswith(f"--vocab {vocab}: tokenizer {name} has {entries} entries; take --vocab {entries} ")
    assert not cache.exists() or stores(cache) == []


def test_text_too_short(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text("x")
    assert "its 1 bytes leave no token for the train part" in refused(str(path), "bytes", 256, 0.5, cache)
    path.write_text("x" * 100)
    dataset = open_dataset(str(path), "bytes", 256, 0.1, cache)
    dataset.check(9)
    with pytest.raises(UserError, match="the validation part has 10 tokens, fewer than the 11 of one sample; take"):
        dataset.check(10)
    with pytest.raises(UserError, match="the training part has 90 tokens, fewer than the 101 of one sample"):
        dataset.check(100)


@pytest.mark.parametrize("validation", [0.0, 1.0, -0.1])
def test_a_share_that_is_none(corpus, cache, validation):
    assert refused(str(corpus), "bytes", 256, validation, cache).startswith(f"--validation {validation}: ")


def test_an_unknown_tokenizer_is_refused_before_the_data_is_read(cache):
    assert refused("missing", "words", 256, 0.1, cache).startswith("--tokenizer words: no such name or file; allowed")
