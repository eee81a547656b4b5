"""Tokenizers: text comes back as it was, folders carry them, broken files and sizes are refused."""

import json
import random
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from jaxgpt.data import load_tokenizer
from jaxgpt.data.tokenizer import (
    END_OF_TEXT,
    BytesTokenizer,
    CharsTokenizer,
    LibraryTokenizer,
    check_size,
    open_tokenizer,
    short_texts,
    train_bpe,
)
from jaxgpt.errors import UserError

ALPHABET = "ab Z\n\t\r é漢🙂'1.,  s\u00a0\u2028l\x1c"
TEXT = "def café(x):\n    return '漢字 🙂' + x  # they'll see\n\n\tx1 = 12345\r\n" * 20


def random_texts(count, length, seed=0):
    draw = random.Random(seed)
    return ["".join(draw.choice(ALPHABET) for _ in range(draw.randint(0, length))) for _ in range(count)]


def bpe(vocab=300):
    return train_bpe(iter([TEXT]), vocab)


def write_gpt2(folder, names=("encoder.json", "vocab.bpe"), extra=()):
    """A small encoder.json and vocab.bpe as GPT-2's: 256 byte symbols, an entry for each merge, the end of text."""
    folder.mkdir(exist_ok=True)
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ã", "©"), *extra]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges] + [END_OF_TEXT]
    (folder / names[0]).write_text(json.dumps({symbol: id for id, symbol in enumerate(symbols)}), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / names[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(params=["bytes", "chars", "bpe", "gpt2"])
def tokenizer(request, tmp_path):
    make = {
        "bytes": BytesTokenizer,
        "chars": lambda: CharsTokenizer(ALPHABET + TEXT),
        "bpe": bpe,
        "gpt2": lambda: open_tokenizer(str(write_gpt2(tmp_path / "gpt2"))),
    }
    return make[request.param]()


def refused(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Round trips


def test_text_comes_back(tokenizer):
    for text in [TEXT, "", *random_texts(300, 40)]:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < tokenizer.size)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids.tolist()) == text


def test_many_texts_are_as_one_by_one(tokenizer):
    texts = random_texts(30, 60)
    for text, ids in zip(texts, tokenizer.encode_many(texts), strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_a_text_may_be_divided_at_its_cut(tokenizer):
    divided = 0
    for text in random_texts(1500, 40, seed=1):
        at = tokenizer.cut(text)
        divided += 0 < at < len(text)
        parts = [tokenizer.encode(text[:at]), tokenizer.encode(text[at:] + "ll s")]
        np.testing.assert_array_equal(np.concatenate(parts), tokenizer.encode(text + "ll s"))
    assert divided > 500 or tokenizer.cut("ab") == 2


def test_ids_outside_the_vocabulary_are_replaced(tokenizer):
    ids = tokenizer.encode("é a").tolist()
    assert tokenizer.decode([tokenizer.size, *ids, -1, tokenizer.size + 5]) == "\ufffdé a\ufffd\ufffd"


def test_a_folder_carries_its_tokenizer(tokenizer, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    tokenizer.save(folder)
    loaded = load_tokenizer(folder)
    assert (loaded.name, loaded.size, loaded.end, loaded.boundary) == (
        tokenizer.name,
        tokenizer.size,
        tokenizer.end,
        tokenizer.boundary,
    )
    np.testing.assert_array_equal(loaded.encode(TEXT), tokenizer.encode(TEXT))
    assert loaded.fingerprint() == tokenizer.fingerprint()


def test_broken_utf8_is_replaced():
    assert BytesTokenizer().decode([104, 195, 105]) == "h\ufffdi"


# Bytes, characters


def test_bytes_are_utf8():
    assert BytesTokenizer().encode("é\n").tolist() == [0xC3, 0xA9, 0x0A]


def test_characters_are_sorted():
    tokenizer = CharsTokenizer("hello é🙂")
    assert tokenizer.characters == " ehloé🙂"
    assert tokenizer.encode("🙂 h").tolist() == [6, 0, 2]


@pytest.mark.parametrize("wrong", ["a", "!", "漢", "\U0010ffff"])
def test_an_unknown_character_is_named_with_its_place(wrong):
    assert f"character {wrong!r} at 2 is not among the 4" in refused(CharsTokenizer("helo").encode, "he" + wrong)


# Byte-pair encoding


def test_training_gives_the_same_entries_each_time():
    one, other = bpe(), bpe()
    assert one.fingerprint() == other.fingerprint()
    assert one.size == 300
    assert (one.end, one.boundary) == (0, END_OF_TEXT)
    assert one.encode(END_OF_TEXT).tolist() == [0]
    assert len(one.encode(TEXT)) < len(TEXT.encode()) / 1.3


@pytest.mark.parametrize("text", [TEXT * 5, "漢" * 5000, " " * 5000, "\n".join("x" * i for i in range(200))])
def test_training_texts_are_short_and_end_with_words(text):
    pieces = list(short_texts([text, "end"]))
    assert "".join(pieces) == text + "end"
    assert max(map(len, pieces)) <= 1024
    for piece, following in pairwise(pieces[:-1]):
        # A word of more than 1024 characters alone is divided.
        assert len(piece) == 1024 or (not piece[-1].isspace() and following[0].isspace())


def test_no_entry_is_longer_than_a_training_text():
    tokenizer = train_bpe(iter(["x" * 8192]), 300)
    assert max(map(len, tokenizer.library.get_vocab())) == 1024


def test_any_byte_can_be_spelt_by_a_tokenizer_trained_on_little():
    tokenizer = train_bpe(iter(["a"]), 1000)
    assert tokenizer.size == 257
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_a_bpe_holds_at_least_the_bytes():
    assert "--vocab 256: a bpe has at least 257" in refused(bpe, 256)


def test_bytes_of_the_command_line_that_are_no_text_do_not_stop_a_prompt(tokenizer):
    if tokenizer.name == "chars":
        assert "'\\udce9' at 0" in refused(tokenizer.encode, "\udce9")
    else:
        assert tokenizer.encode("\udce9").size > 0


# Files of others


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
@pytest.mark.parametrize("named", ["folder", 0, 1])
def test_gpt2_files_are_found_by_folder_or_either_file(tmp_path, names, named):
    folder = write_gpt2(tmp_path / "gpt2", names)
    tokenizer = open_tokenizer(str(folder if named == "folder" else folder / names[named]))
    assert tokenizer.name == "bpe-263"
    assert tokenizer.end == tokenizer.size - 1 == 262
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    # "hello", " w" and "é" are merged as the file says; a merge never crosses a word's start.
    expected = [259, 260, symbols.index("o"), 261, symbols.index("Ġ"), symbols.index("Ġ"), 262]
    assert tokenizer.encode("hello woé  " + END_OF_TEXT).tolist() == expected


def test_gpt2_words_are_divided_by_its_rule(tmp_path):
    merges = [("'", "ll"), ("1", "2"), ("x", "1"), ("Ġ", "Ġ"), ("Ġ", "a"), ("ĠĠ", "a"), (".", "Ġ")]
    tokenizer = open_tokenizer(str(write_gpt2(tmp_path / "gpt2", extra=merges)))

    def parts(text):
        return [tokenizer.decode([id]) for id in tokenizer.encode(text)]

    assert parts("b'll") == ["b", "'ll"]
    assert parts("x12") == ["x", "12"]
    assert parts("b   a") == ["b", "  ", " a"]
    assert parts(". a") == [".", " a"]


def test_a_tokenizer_json_is_used_as_it_is(tmp_path):
    ours = bpe(280)
    ours.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    # What others' files may say and what must not reach the corpus: cut-off, padding, a start token.
    fields["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(fields), encoding="utf-8")
    for place in (path, tmp_path):
        np.testing.assert_array_equal(open_tokenizer(str(place)).encode(TEXT), ours.encode(TEXT))


def test_a_tokenizer_of_unknown_rules_is_never_given_a_divided_text():
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.normalizer = normalizers.Lowercase()
    tokenizer = LibraryTokenizer(library)
    assert tokenizer.cut("a b c") == 0
    assert (tokenizer.name, tokenizer.end, tokenizer.boundary) == ("wordlevel-2", None, "\n\n")


# What is refused


@pytest.mark.parametrize("name", ["byte", "missing/tokenizer.json"])
def test_an_unknown_name_lists_what_is_allowed(name):
    message = refused(open_tokenizer, name)
    assert message.startswith(f"--tokenizer {name}: no such name or file; allowed are bytes, chars, bpe, ")


def test_a_folder_without_a_tokenizer(tmp_path):
    assert "no tokenizer in this folder" in refused(open_tokenizer, str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"text", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[1]"])
def test_a_broken_tokenizer_json(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    assert f"{path}: not a file of the tokenizers library" in refused(open_tokenizer, str(path))
    assert str(path) in refused(load_tokenizer, tmp_path)


def test_a_truncated_tokenizer_json(tmp_path):
    bpe().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-100])
    assert str(path) in refused(open_tokenizer, str(path))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("encoder.json", b"{", "not JSON"),
        ("encoder.json", b"\xff", "not JSON"),
        ("encoder.json", b"[]", "not a JSON object"),
        ("encoder.json", b'{"a": 0, "b": 2}', "ids must be 0"),
        ("encoder.json", b'{"a": 0, "b": "c"}', "ids must be 0"),
        ("encoder.json", b'{"a": 0, "b": 1}', "no entry for 254 of the 256 bytes"),
        ("vocab.bpe", b"h e\nl q\n", "line 2 is no merge"),
        ("vocab.bpe", b"#version\nhe\n", "line 2 is no merge"),
        ("vocab.bpe", b"\xff", "not UTF-8 at byte 0"),
        ("vocab.bpe", None, "cannot be read (No such file or directory)"),
        ("encoder.json", None, "cannot be read (No such file or directory)"),
    ],
)
def test_broken_gpt2_files(tmp_path, file, content, message):
    folder = write_gpt2(tmp_path / "gpt2")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    found = refused(open_tokenizer, str(folder))
    assert found.startswith(str(folder / file))
    assert message in found


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"kind": "chars"}', '{"kind": "words"}'])
def test_a_broken_file_of_our_own(tmp_path, content):
    BytesTokenizer().save(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    assert refused(load_tokenizer, tmp_path).startswith(f"{path}: not ")


def test_a_folder_that_lost_its_tokenizer(tmp_path):
    assert "cannot be read" in refused(load_tokenizer, tmp_path)


def test_more_entries_than_the_vocabulary():
    check_size(BytesTokenizer(), 256)
    message = refused(check_size, BytesTokenizer(), 255)
    assert message == "--vocab 255: tokenizer bytes has 256 entries; take --vocab 256 or more, or another --tokenizer"
