"""Checksums of stored files: a CRC-32 a chunk, so that damage is found in the place where it is."""

import hashlib
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.errors import UserError

CHUNK = 2**22
"""Bytes under one checksum."""
CHECKED = 128
"""Most chunks checked on opening (512 MiB, about half a second); of a larger store as many, evenly spread."""


def _chosen(chunks: int, most: int | None) -> Iterable[int]:
    return range(chunks) if most is None else np.linspace(0, chunks - 1, min(chunks, most), dtype=int).tolist()


def checksums(path: Path, most: int | None = None) -> dict[str, Any]:
    """Size and CRC-32 of each chunk, or of so many of them, evenly spread."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        found = []
        for number in _chosen(-(-size // CHUNK), most):
            file.seek(number * CHUNK)
            found.append(zlib.crc32(file.read(CHUNK)))
    return {"bytes": size, "crc32": found}


def check(path: Path, expected: dict[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise damaged(path, f"{size} bytes in place of {expected['bytes']}")
        chunks = expected["crc32"]
        with open(path, "rb") as file:
            for number in _chosen(len(chunks), CHECKED):
                file.seek(number * CHUNK)
                if zlib.crc32(file.read(CHUNK)) != chunks[number]:
                    raise damaged(path, f"the checksum of the {CHUNK} bytes at {number * CHUNK} differs")
    except FileNotFoundError:
        raise damaged(path, "missing") from None


def digest(manifest: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: damaged token store ({what}); delete the folder {path.parent} and run again")
