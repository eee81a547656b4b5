"""Sources: what is taken, in which order, how it is split, and what is refused."""

import builtins
import os
import shutil
import sysconfig

import pytest

from jaxgpt.data import sources
from jaxgpt.errors import UserError

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


def fill(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def names(data):
    return [file.name for file in sources.find_documents(str(data)).files]


def text(spans):
    return "".join("".join(sources.texts([span])) + "|" * span.boundaries for span in spans)


def refused(data):
    with pytest.raises(UserError) as caught:
        sources.find_documents(str(data))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is taken


def test_a_folder_gives_its_text_files_at_any_depth(tmp_path):
    fill(
        tmp_path,
        {
            "a.txt": "a",
            "README": "b",
            "deep/er/c.md": "c",
            ".hidden": "no",
            ".git/config": "no",
            "deep/.cache/x.txt": "no",
            "image.png": PNG,
            "empty.txt": "",
        },
    )
    source = sources.find_documents(str(tmp_path))
    assert sorted(file.name for file in source.files) == ["README", "a.txt", "deep/er/c.md"]
    assert source.left_out == ("image.png",)
    assert source.size == 3
    assert source.describe() == f"{tmp_path}: 3 files, 3 bytes (1 left out: image.png)"


def test_a_pattern_gives_exactly_what_it_names(tmp_path):
    fill(tmp_path, {"src/a.py": "a", "src/deep/b.py": "b", "src/c.txt": "c", "other/d.py": "d"})
    assert sorted(names(tmp_path / "src/**/*.py")) == ["a.py", "deep/b.py"]
    assert sorted(names(tmp_path / "*/?.py")) == ["other/d.py", "src/a.py"]
    fill(tmp_path, {"src/image.py": PNG})
    assert "image.py: not UTF-8 at byte 0" in refused(tmp_path / "src/*.py")


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    fill(tmp_path, {"a[1].txt": "one", "a1.txt": "other"})
    assert names(tmp_path / "a[1].txt") == ["a[1].txt"]


def test_a_file_reached_twice_is_taken_once(tmp_path):
    fill(tmp_path, {"a.txt": "a", "b/c.txt": "c"})
    (tmp_path / "z.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    assert sorted(names(tmp_path)) == ["a.txt", "b/c.txt"]
    assert len(names(tmp_path / "**/*.txt")) == 2


def test_the_standard_library_is_source_without_tests_or_packages():
    source = sources.find_documents("stdlib")
    found = {file.name for file in source.files}
    assert {"json/decoder.py", "argparse.py", "asyncio/base_events.py"} <= found
    assert all(name.endswith(".py") for name in found)
    folders = {folder for name in found for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    assert not any(name.startswith(("/", "_sysconfigdata")) for name in found)
    assert source.size > 5_000_000


def test_undecodable_files_of_the_library_are_left_out(tmp_path, monkeypatch):
    fill(tmp_path, {"good.py": "x = 1", "old.py": b"# caf\xe9", "test/test_x.py": "no", "notes.txt": "no"})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    source = sources.find_documents("stdlib")
    assert [file.name for file in source.files] == ["good.py"]
    assert source.left_out == ("old.py",)
    shutil.rmtree(tmp_path)
    assert "no library source" in refused("stdlib")


# The order


def test_the_order_is_shuffled_and_the_same_anywhere(tmp_path, monkeypatch):
    files = {f"part{i % 3}/{i:03}.txt": f"text {i}" for i in range(60)}
    first = fill(tmp_path / "first", files)
    second = fill(tmp_path / "elsewhere/second", dict(reversed(files.items())))
    order = names(first)
    assert order == names(second)
    assert order != sorted(order)
    monkeypatch.chdir(tmp_path)
    assert order == names("first/**/*.txt") == names(tmp_path / "first/**/*.txt") == names("first") == names("./first/")
    # The last fifth is a sample of all three folders.
    assert {name[:5] for name in order[-12:]} == {"part0", "part1", "part2"}


# The split


@pytest.mark.parametrize("validation", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_parts_do_not_overlap_and_miss_nothing(tmp_path, validation):
    fill(tmp_path, {f"{i}.txt": f"<{i}:" + "héllo 漢字 🙂" * i + ">" for i in range(20)})
    source = sources.find_documents(str(tmp_path))
    train, held_out = sources.split(source, validation)
    assert text(train) + text(held_out) == text(sources.whole(source))
    assert text(sources.whole(source)).count("|") == 19
    size = sum(span.stop - span.start for span in held_out)
    assert 0 <= size - source.size * validation < 4


def test_the_cut_is_at_the_share_of_one_file_and_never_inside_a_character(tmp_path):
    path = fill(tmp_path, {"a.txt": "0123456789"}) / "a.txt"
    train, held_out = sources.split(sources.find_documents(str(path)), 0.3)
    assert (text(train), text(held_out)) == ("0123456", "789")
    path.write_text("a🙂é漢b", encoding="utf-8")
    source = sources.find_documents(str(path))
    for percent in range(1, 100):
        train, held_out = sources.split(source, percent / 100)
        assert text(train) + text(held_out) == "a🙂é漢b"


def test_text_longer_than_a_block_is_read_whole(tmp_path):
    content = "é漢🙂x" * 100_000
    path = fill(tmp_path, {"a.txt": "y" + content}) / "a.txt"
    pieces = list(sources.texts(sources.whole(sources.find_documents(str(path)))))
    assert len(pieces) > 3
    assert "".join(pieces) == "y" + content


# What is refused


@pytest.mark.parametrize("name", ["missing.txt", "missing/*.txt", ""])
def test_what_is_not_there(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert refused(name).startswith(f"--data {name}: no ")


def test_what_holds_no_text(tmp_path):
    assert "no files there" in refused(tmp_path)
    fill(tmp_path, {"empty.txt": ""})
    assert "the file is empty" in refused(tmp_path / "empty.txt")
    assert "the file is empty" in refused(tmp_path)
    fill(tmp_path, {"image.png": PNG})
    assert "1 binary and 1 empty" in refused(tmp_path)


@pytest.mark.parametrize("before", ["", "ok\n", "x" * (2**18 - 1) + "é", "漢" * 200_000])
def test_bad_utf8_is_named_with_its_offset(tmp_path, before):
    start = before.encode()
    path = fill(tmp_path, {"bad.txt": start + b"\xe9 and more", "good.txt": "fine"}) / "bad.txt"
    for data in (path, tmp_path, tmp_path / "*.txt"):
        assert f"{path}: not UTF-8 at byte {len(start)} " in refused(data)
    path.write_bytes(start + "漢".encode()[:2])
    assert f"{path}: not UTF-8 at byte {len(start)} " in refused(path)


def test_utf16_is_refused_not_left_out(tmp_path):
    fill(tmp_path, {"windows.txt": "text".encode("utf-16"), "good.txt": "fine"})
    assert "windows.txt: not UTF-8 at byte 0" in refused(tmp_path)


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = fill(tmp_path, {"secret.txt": "x"}) / "secret.txt"
    really_open = builtins.open

    def locked(file, *rest, **named):
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied", str(file))
        return really_open(file, *rest, **named)

    monkeypatch.setattr(builtins, "open", locked)
    for data in (path, tmp_path):
        assert f"{path}: cannot be read (Permission denied)" in refused(data)


def test_links_to_nowhere_and_pipes_are_refused(tmp_path):
    fill(tmp_path, {"good.txt": "fine"})
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    assert "gone.txt: cannot be read" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refused(tmp_path / "pipe")


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = fill(tmp_path, {"a.txt": "one text"}) / "a.txt"
    (span,) = sources.whole(sources.find_documents(str(path)))
    path.write_text("another text")
    with pytest.raises(UserError, match="changed while it was read"):
        list(sources.read(span))


def test_names_that_are_not_utf8_can_be_printed(tmp_path):
    with open(os.path.join(os.fsencode(tmp_path), b"caf\xe9.bin"), "wb") as file:
        file.write(PNG)
    fill(tmp_path, {"good.txt": "fine"})
    assert "1 left out: caf\ufffd.bin" in sources.find_documents(str(tmp_path)).describe()


def test_a_run_in_the_folder_is_no_text(tmp_path):
    """Else a run that is written beside its data changes them."""
    (tmp_path / "a.txt").write_text("text")
    run = tmp_path / "runs" / "demo-1"
    (run / "checkpoints").mkdir(parents=True)
    for name in (".lock", "config.json", "sample.txt", "checkpoints/notes.txt"):
        (run / name).write_text("not text to train on")
    assert [file.name for file in sources.find_documents(str(tmp_path)).files] == ["a.txt"]
