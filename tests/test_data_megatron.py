"""Megatron's files: byte for byte as its layout says, read back, and refused in one line where they are not."""

import struct

import numpy as np
import pytest

from jaxgpt.data import megatron
from jaxgpt.errors import UserError

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10, 11, 12]]


def by_hand(kind: str = "H", code: int = 8) -> tuple[bytes, bytes]:
    """DOCUMENTS as .bin and .idx, field by field from the table of the layout."""
    lengths = [3, 0, 1, 4]
    size = struct.calcsize(kind)
    tokens = struct.pack(f"<8{kind}", 5, 6, 7, 8, 9, 10, 11, 12)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 4, 5)
    index += struct.pack("<4i", *lengths) + struct.pack("<4q", 0, 3 * size, 3 * size, 4 * size)
    return tokens, index + struct.pack("<5q", 0, 1, 2, 3, 4)


@pytest.fixture
def made(tmp_path):
    """A pair made by hand; its prefix."""
    tokens, index = by_hand()
    (tmp_path / "a.bin").write_bytes(tokens)
    (tmp_path / "a.idx").write_bytes(index)
    return tmp_path / "a"


def refused(path) -> str:
    with pytest.raises(UserError) as caught:
        megatron.read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("vocab", "kind", "code"), [(300, "H", 8), (65_499, "H", 8), (65_500, "i", 4)])
def test_written_byte_for_byte(tmp_path, vocab, kind, code):
    assert megatron.write(tmp_path / "w", [np.array(d) for d in DOCUMENTS], vocab) == 8
    assert ((tmp_path / "w.bin").read_bytes(), (tmp_path / "w.idx").read_bytes()) == by_hand(kind, code)


def test_nothing_is_overwritten(made):
    before = made.with_suffix(".bin").read_bytes()
    with pytest.raises(UserError, match=r"a\.bin: is there already"):
        megatron.write(made, [np.array([1])], 300)
    assert made.with_suffix(".bin").read_bytes() == before


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_file_made_by_hand_is_read(made, suffix):
    found = megatron.read(str(made) + suffix)
    assert found.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert isinstance(found.tokens, np.memmap)
    documents = found.documents
    assert documents.start(np.arange(4)).tolist() == [0, 3, 3, 4]
    assert documents.until(np.arange(8)).tolist() == [1, 1, 1, 3, 4, 4, 4, 4]


def test_documents_of_several_sequences_and_modes(tmp_path):
    """Sequences 3, 2 | 4: the second document begins at token 5; multimodal files have a byte a sequence more."""
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 3)
    index += struct.pack("<3i", 3, 2, 4) + struct.pack("<3q", 0, 12, 20) + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "m.bin").write_bytes(np.arange(9, dtype="<i4").tobytes())
    for modes in (b"", b"\0\1\0"):
        (tmp_path / "m.idx").write_bytes(index + modes)
        found = megatron.read(tmp_path / "m")
        assert found.documents.start(np.arange(2)).tolist() == [0, 5]
        assert found.tokens.tolist() == list(range(9))


def test_no_documents_at_all(tmp_path):
    assert megatron.write(tmp_path / "n", [], 300) == 0
    found = megatron.read(tmp_path / "n")
    assert (len(found.tokens), found.documents.count) == (0, 0)
    rows, places = found.documents.between(np.array([0]), np.array([5]))
    assert (rows.size, places.size) == (0, 0)


def test_documents_between_places():
    starts = np.array([0, 3, 3, 4, 9, 20])
    documents = megatron.Documents(6, lambda which: starts[which])
    first, last = np.array([0, 3, 4, 8, 25]), np.array([4, 3, 19, 30, 40])
    rows, places = documents.between(first, last)
    found = [places[rows == row].tolist() for row in range(5)]
    assert found == [[s for s in starts if a < s <= b] for a, b in zip(first, last, strict=True)]


def test_every_truncation_is_refused(made):
    index, tokens = (made.with_suffix(suffix) for suffix in (".idx", ".bin"))
    whole, text = index.read_bytes(), tokens.read_bytes()
    for size in range(len(whole)):
        index.write_bytes(whole[:size])
        assert str(index) in refused(made)
    index.write_bytes(whole + b"\0" * 5)
    assert "too long" in refused(made)
    index.write_bytes(whole)
    for size in range(len(text)):
        tokens.write_bytes(text[:size])
        assert str(tokens) in refused(made)
    tokens.write_bytes(text + b"\0\0")
    assert "has 18 bytes, and a.idx speaks of 16" in refused(made)


@pytest.mark.parametrize(
    ("place", "content", "says"),
    [
        (0, b"TNTIDX\0\0\0", "not an index of Megatron's"),
        (9, b"\2", "version 2"),
        (17, b"\6", "token type 6 holds no token ids"),
        (17, b"\x09", "token type 9 holds no token ids"),
        (17, b"\4", "a.bin: has 16 bytes, and a.idx speaks of"),
        (34, b"\2", "do not lie back to back"),
        (54, b"\1", "do not lie back to back"),
        (82, b"\1", "documents go from sequence 1 to 4"),
        (114, b"\3", "documents go from sequence 0 to 3"),
        (98, b"\0", "do not follow each other"),
    ],
)
def test_what_does_not_fit_together_is_named(made, place, content, says):
    index = made.with_suffix(".idx")
    whole = index.read_bytes()
    index.write_bytes(whole[:place] + content + whole[place + len(content) :])
    assert says in refused(made)


def test_half_of_a_pair(made):
    made.with_suffix(".bin").unlink()
    assert "a.bin: no such file; Megatron's tokens are a pair" in refused(made.with_suffix(".idx"))
    made.with_suffix(".idx").unlink()
    assert "a.idx: no such file" in refused(made)


def test_a_document_too_long_for_the_format(tmp_path):
    with pytest.raises(UserError, match="a document of 2,147,483,648 tokens"):
        megatron.write_index(tmp_path / "l.idx", np.dtype("<u2"), 1, lambda: iter([np.array([2**31])]))
