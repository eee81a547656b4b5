"""A parameter of ours as a view of the tensors of a file, and a file's tensor made of our parameters.

A view copies nothing where the file's tensor is mapped memory: what is sliced out of it reads its own pages alone.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.errors import UserError
from jaxgpt.interop.copying import copy, zeros
from jaxgpt.interop.families import Family
from jaxgpt.model.parameters import Parameter, dimensions, parameters

LAYERS = "layers"
_NAMED = 3
"""Tensors named in a report."""


@runtime_checkable
class Tensors(Protocol):
    """The tensors of a file or of several, by name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def __getitem__(self, name: str) -> np.ndarray: ...


class Row(NamedTuple):
    """Where a parameter lies in a file, and what of it."""

    name: str
    dims: str


def sizes_of(config: ModelConfig) -> dict[str, int]:
    """Sizes of the named dimensions in a file: without the padding of the vocabulary."""
    return dimensions(config) | {"vocab": config.vocab}


def _parts(dims: str) -> list[list[str]]:
    return [entry.split("*") for entry in dims.split()]


def _size(part: str, sizes: Mapping[str, int]) -> int:
    return int(part.partition("/")[2]) if "/" in part else sizes[part.removesuffix("~")]


def shape_in_file(dims: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a tensor with these dimensions."""
    return tuple(int(np.prod([_size(part, sizes) for part in entry])) for entry in _parts(dims))


def as_ours(tensor: np.ndarray, dims: str, ours: Sequence[str], sizes: Mapping[str, int]) -> np.ndarray:
    """A file's tensor with dimensions dims in the order of ours; a view, unless rotary pairs must change places."""
    shape: list[int] = []
    index: list[int | slice] = []
    names: list[str] = []
    for part in (part for entry in _parts(dims) for part in entry):
        if "/" in part:
            shape.append(_size(part, sizes))
            index.append(int(part.partition("/")[0]))
            continue
        halves = part.endswith("~")
        shape += [_size(part, sizes) // 2, 2] if halves else [_size(part, sizes)]
        names += [part, "half"] if halves else [part]
        index += [slice(None)] * (1 + halves)
    view = tensor.reshape(shape)[tuple(index)]
    wanted = [n for d in ours for n in (["half", f"{d}~"] if f"{d}~" in names else [d])]
    view = view.transpose([names.index(n) for n in wanted])
    return view.reshape([sizes[d] for d in ours])


def as_file(arrays: Mapping[str, np.ndarray], rows: Mapping[str, Row], config: ModelConfig) -> np.ndarray:
    """The file's tensor that holds these parameters (several where it stacks them), each without its layers."""
    sizes, table = sizes_of(config), parameters(config)
    stacked: np.ndarray | None = None
    for name, row in rows.items():
        ours = [d for d in table[name].dims if d != LAYERS]
        parts = [part for entry in _parts(row.dims) for part in entry]
        kept = [part for part in parts if "/" not in part]
        piece = arrays[name].transpose([ours.index(part) for part in kept])
        index = tuple(int(part.partition("/")[0]) if "/" in part else slice(None) for part in parts)
        if stacked is None:
            stacked = np.empty([_size(part, sizes) for part in parts], piece.dtype)
        stacked[index] = piece
    assert stacked is not None
    return stacked.reshape(shape_in_file(next(iter(rows.values())).dims, sizes))


def rows_of(family: Family, config: ModelConfig) -> dict[str, Row]:
    """The table's rows for the parameters that the model has, in the model's order."""
    return {name: Row(*family.tensors[name]) for name in parameters(config) if name in family.tensors}


def tensors_of(name: str, row: Row, config: ModelConfig) -> list[str]:
    """Names in a file of all layers of a parameter, in order."""
    layers = parameters(config)[name].dims[0] == LAYERS
    return [row.name.format(layer) for layer in range(config.layers)] if layers else [row.name]


class Weights:
    """The parameters of a model in a file, by our names; checked when it is made."""

    def __init__(self, where: str, tensors: Tensors, family: Family, config: ModelConfig) -> None:
        """Raises UserError that names what is missing, unexpected or of another shape."""
        self._tensors, self._config, self._sizes = tensors, config, sizes_of(config)
        self._rows = rows_of(family, config)
        self._drop = family.prefix if not any(name.startswith(family.prefix) for name in tensors.shapes) else ""
        self._aliases = {name: other for name, other in family.aliases if other in tensors.shapes}
        self._check(where, family)

    def _check(self, where: str, family: Family) -> None:
        shapes = self._tensors.shapes
        wanted = {
            self._found(tensor): shape_in_file(row.dims, self._sizes)
            for name, row in self._rows.items()
            for tensor in tensors_of(name, row, self._config)
        }
        # a tied head may be stored all the same: the tie is the configuration's
        ignored = [*family.ignored, *([re.escape(family.tensors["head.weight"][0])] if self._config.tied else [])]
        missing = [name for name in wanted if name not in shapes]
        extra = [n for n in shapes if n not in wanted and not any(re.fullmatch(pattern, n) for pattern in ignored)]
        other = [
            f"{name} is {list(shapes[name])}, not {list(shape)}"
            for name, shape in wanted.items()
            if name in shapes and tuple(shapes[name]) != shape
        ]
        said = [
            f"{len(names)} {what}: {', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}"
            for what, names in (("missing", missing), ("unexpected", extra), ("of another shape", other))
            if names
        ]
        if said:
            raise UserError(
                f"{where}: its tensors are not those of the {family.kind} model asked for: {'; '.join(said)}"
            )

    def _found(self, name: str) -> str:
        """What the file calls it."""
        return self._aliases.get(name, name.removeprefix(self._drop))

    def layer(self, name: str, layer: int | None) -> np.ndarray:
        """One layer of a parameter (None: one that has no layers), as our dimensions lie."""
        row = self._rows[name]
        ours = [d for d in parameters(self._config)[name].dims if d != LAYERS]
        tensor = self._tensors[self._found(row.name if layer is None else row.name.format(layer))]
        return as_ours(tensor, row.dims, ours, self._sizes)

    def read(self, name: str, parameter: Parameter, index: tuple[slice, ...]) -> np.ndarray:
        """fp32 values of a slice of a parameter as a mesh holds it: blocks in their stages' rows, vocabulary padded;
        what holds nothing is zero."""
        spans = [range(*each.indices(size)) for each, size in zip(index, parameter.shape, strict=True)]
        out = zeros(tuple(len(span) for span in spans))
        if parameter.dims[0] == LAYERS:
            rows = parameter.rows or range(parameter.shape[0])
            for place, row in enumerate(spans[0]):
                if rows[row] >= 0:
                    copy(out[place], self.layer(name, rows[row])[index[1:]])
            return out
        held = self.layer(name, None)[spans[0].start : spans[0].stop]
        copy(out[: len(held)], held[(slice(None), *index[1:])])
        return out
