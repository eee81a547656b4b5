"""The safetensors format: a length, a JSON header, and tensors as they lie in memory.

Read as views of the mapped file, so that a part of a tensor, transposed or not, costs its own pages and no copy of the
whole; written tensor after tensor, so that a model need never be whole on the host.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxgpt.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_TYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_MOST_HEADER = 100_000_000
"""Bytes; what the reference reader allows."""
DTYPES = {"fp32": "F32", "bf16": "BF16"}
"""What can be written."""


class SafeTensors:
    """The tensors of some files, by name."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Raises UserError where a file cannot be read or is damaged."""
        self._views: dict[str, np.ndarray] = {}
        for file in files:
            self._views |= _views(file)
        self.shapes = {name: view.shape for name, view in self._views.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._views[name]


def files_in(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder, by its index where there is one. Empty: it has none.

    Raises UserError where the index is damaged or names a file that is not there.
    """
    index = folder / INDEX
    if not index.exists():
        return [folder / SINGLE] if (folder / SINGLE).exists() else []
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        plain = all(Path(name).name == name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not an index of safetensors ({error}); fetch it again") from None
    if not plain:
        raise UserError(f"{index}: names files outside of its folder; fetch it again")
    return [folder / name for name in names]


def _views(file: Path) -> dict[str, np.ndarray]:
    try:
        mapped = np.memmap(file, np.uint8, mode="r")
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error}); fetch it again") from None
    except ValueError:  # an empty file cannot be mapped
        raise _damaged(file, "it is empty") from None
    size = struct.unpack("<Q", mapped[:8].tobytes())[0] if len(mapped) >= 8 else _MOST_HEADER + 1
    if size > min(_MOST_HEADER, len(mapped) - 8):
        raise _damaged(file, "its header is cut off")
    try:
        header = json.loads(mapped[8 : 8 + size].tobytes())
        return {
            name: _view(file, mapped[8 + size :], name, entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(file, f"its header cannot be read: {error}") from None


def _view(file: Path, data: np.ndarray, name: str, entry: dict[str, Any]) -> np.ndarray:
    if entry["dtype"] not in _TYPES:
        raise UserError(f"{file}: tensor {name} is {entry['dtype']}, which is not read; known are {', '.join(_TYPES)}")
    dtype, shape = np.dtype(_TYPES[entry["dtype"]]), tuple(int(n) for n in entry["shape"])
    begin, end = (int(n) for n in entry["data_offsets"])
    if not 0 <= begin <= end <= len(data) or end - begin != math.prod(shape) * dtype.itemsize:
        raise _damaged(file, f"tensor {name} does not lie in it as its header says")
    return data[begin:end].view(dtype).reshape(shape)


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"{file}: not a whole safetensors file ({why}); fetch it again")


def write(
    folder: Path, shapes: dict[str, tuple[int, ...]], tensors: Iterator[tuple[str, np.ndarray]], dtype: str, most: int
) -> None:
    """Writes tensors, in the order of shapes, to model.safetensors, or to several files of at most `most` bytes each
    (unless one tensor is larger) with their index."""
    kind = np.dtype(_TYPES[dtype])
    groups: list[list[str]] = [[]]
    room = most
    for name, shape in shapes.items():
        size = math.prod(shape) * kind.itemsize
        if size > room and groups[-1]:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= size
    count = len(groups)
    files = [SINGLE if count == 1 else f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for file, names in zip(files, groups, strict=True):
        _write_one(folder / file, {name: shapes[name] for name in names}, tensors, dtype, kind)
    if count > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * kind.itemsize
        where = {name: file for file, names in zip(files, groups, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_one(
    file: Path,
    shapes: dict[str, tuple[int, ...]],
    tensors: Iterator[tuple[str, np.ndarray]],
    dtype: str,
    kind: "np.dtype[Any]",
) -> None:
    with file.open("wb") as out:
        out.write(_header({name: (shape, dtype) for name, shape in shapes.items()}))
        for expected, shape in shapes.items():
            name, tensor = next(tensors)
            if (name, tensor.shape) != (expected, shape):
                raise RuntimeError(f"{name} {tensor.shape} comes where {expected} {shape} was announced")
            out.write(_bytes(tensor.astype(kind, copy=False)))


def write_pieces(
    file: Path, tensors: Mapping[str, tuple[tuple[int, ...], "np.dtype[Any]"]], pieces: Iterable[np.ndarray]
) -> None:
    """Writes one file of tensors of these shapes and types, from pieces that follow one another in it: no tensor need
    be whole on the host. Raises FileExistsError where something is there."""
    codes = {np.dtype(kind): code for code, kind in _TYPES.items()}
    with file.open("xb") as out:
        out.write(_header({name: (shape, codes[kind]) for name, (shape, kind) in tensors.items()}))
        for piece in pieces:
            out.write(_bytes(piece))


def _header(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> bytes:
    """Of tensors of these shapes and types, which lie in the file in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        begin, end = end, end + math.prod(shape) * np.dtype(_TYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
