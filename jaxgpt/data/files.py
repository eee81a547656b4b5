"""Which files --data names: one, a folder's, those of a pattern, or the Python standard library's source."""

import glob
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from jaxgpt.data import formats
from jaxgpt.errors import UserError

STDLIB = "stdlib"
_NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Folders below the standard library that hold tests or other people's packages."""


def place_and_field(data: str) -> tuple[str, str]:
    """The path and the field of "a.jsonl#content"; a file that is named with a # is that file."""
    path = os.path.expanduser(data)
    before, mark, field = path.rpartition("#")
    if mark and before and field and "/" not in field and not os.path.exists(path):
        return before, field
    return path, formats.FIELD


def find(data: str) -> list[tuple[str, str]]:
    """(name, path) of each file that --data names, sorted; name: its path below the folder it was found in.

    Raises UserError where nothing is there.
    """
    if data == STDLIB:
        return sorted(_library_files())
    path, _ = place_and_field(data)
    if os.path.isdir(path):
        return sorted(_walk(path))
    if os.path.exists(path):
        if not os.path.isfile(path):
            raise UserError(f"--data {data}: neither a file nor a folder; store the text in a file first")
        return [(os.path.basename(path), path)]
    if not glob.has_magic(path):
        raise UserError(
            f'--data {data}: no such file or folder; "{STDLIB}" is the Python standard library\'s source, and a blend '
            'gives every source a weight, "0.7:a.jsonl,0.3:b/"'
        )
    root = _fixed_folder(path)
    return sorted((_name(match, root), match) for match in glob.glob(path, recursive=True) if os.path.isfile(match))


def unreadable(path: str, error: OSError) -> UserError:
    """What to say of a file that the system refuses."""
    return UserError(f"{shown(path)}: cannot be read ({error.strerror or error}); check the path and its permissions")


def shown(name: str) -> str:
    """The name as it can be printed, whatever bytes it has on disk."""
    return os.fsencode(name).decode("utf-8", "replace")


def _walk(root: str) -> Iterator[tuple[str, str]]:
    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error)

    for folder, folders, files in os.walk(root, onerror=refuse):
        if ".lock" in files and "config.json" in files:  # a run, written while this is read: its text is not data
            folders[:], files = [], []
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in files:
            path = os.path.join(folder, file)
            # A link to nowhere is kept, to be refused by name; sockets and pipes are no text.
            if not file.startswith(".") and (os.path.isfile(path) or os.path.islink(path)):
                yield _name(path, root), path


def _library_files() -> list[tuple[str, str]]:
    root = sysconfig.get_path("stdlib")
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_THE_LIBRARY]
        # _sysconfigdata is written when Python is built and holds that machine's paths.
        source = [file for file in files if file.endswith(".py") and not file.startswith("_sysconfigdata")]
        found += [(_name(os.path.join(folder, file), root), os.path.join(folder, file)) for file in source]
    if not found:
        raise UserError(f"--data {STDLIB}: this Python has no library source in {root}; name a text file or folder")
    return found


def _fixed_folder(pattern: str) -> str:
    """The folder before the pattern's first wildcard."""
    parts = Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return os.path.join(*parts[:fixed]) if fixed else ""


def _name(path: str, root: str) -> str:
    return Path(os.path.relpath(path, root or ".")).as_posix()
