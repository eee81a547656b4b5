"""Arrays drawn as they lie on the devices of a mesh: equal numbers, and colours, are copies of one part."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxgpt.sharding.rows import AXES
from jaxgpt.sharding.sbp import S, sbp


@dataclass(frozen=True)
class Drawn:
    """One array on a mesh."""

    name: str
    shape: tuple[int, ...]
    signature: str
    """Where each axis splits it, "fsdp: S(embed), tensor: S(mlp)"; "B": whole copies on all."""
    parts: np.ndarray
    """Which part each device of the mesh has, numbered from 0; of the mesh's shape."""

    @property
    def count(self) -> int:
        return int(self.parts.max()) + 1


def draw(name: str, array: jax.Array, dims: Sequence[str]) -> Drawn:
    """dims: names of the array's dimensions. The array must lie on a mesh."""
    where = array.sharding
    assert isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh)
    places = where.devices_indices_map(array.shape)
    numbers: dict[tuple[tuple[int | None, int | None], ...], int] = {}
    parts = np.zeros(where.mesh.devices.shape, int)
    for place in np.ndindex(*parts.shape):
        index = tuple((s.start, s.stop) for s in places[where.mesh.devices[place]] or ())
        parts[place] = numbers.setdefault(index, len(numbers))
    split = [f"{axis}: S({dims[p.dim]})" for axis, p in sbp(where).items() if isinstance(p, S)]
    return Drawn(name, array.shape, ", ".join(split) or "B", parts)


_PLACE = re.compile(rf"\b({'|'.join(AXES)}): (?:S\([^()]*\)|P\b|varies)")


def coloured(text: str) -> str:
    """A text as HTML, in which what "tensor: S(heads)" says of an axis has the axis' colour."""

    def place(found: re.Match[str]) -> str:
        hue = 360 * AXES.index(found[1]) // len(AXES)
        return f'<span style="color:#000;background:hsl({hue},70%,85%);padding:0 3px">{found[0]}</span>'

    return _PLACE.sub(place, html.escape(text))


def plain_rows(rows: Sequence[Sequence[object]]) -> list[str]:
    """Rows of cells as lines of text, in columns; a row may have fewer cells than others."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = max((len(row) for row in cells), default=0)
    widths = [max(len(row[c]) for row in cells if c < len(row)) for c in range(columns)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip() for row in cells]


def html_table(rows: Sequence[Sequence[object]]) -> str:
    """The same as HTML, coloured."""
    lines = ("".join(f"<td>{coloured(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


@dataclass(frozen=True)
class Drawing:
    """Arrays of one mesh as a table: plain in a terminal, in colours in a notebook."""

    mesh: Mapping[str, int]
    rows: Sequence[Drawn]

    def __repr__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1) or "one device"
        cells = [(r.name, " x ".join(map(str, r.shape)), r.signature, self._line(r)) for r in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)
        return "\n".join([f"{axes}; the part that each device holds, in the mesh's order", *lines])

    def _line(self, drawn: Drawn) -> str:
        width = len(str(drawn.count - 1))
        return " ".join(f"{part:>{width}}" for part in drawn.parts.ravel())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>{html.escape(r.name)}</code></td><td>{' x '.join(map(str, r.shape))}</td>"
            f"<td>{coloured(r.signature)}</td><td>{self._cells(r)}</td></tr>"
            for r in self.rows
        )
        head = "<tr><th>parameter</th><th>shape</th><th>layout</th><th>part on each device</th></tr>"
        return f"<table>{head}{rows}</table>"

    def _cells(self, drawn: Drawn) -> str:
        return "".join(
            f'<span style="display:inline-block;min-width:1.6em;text-align:center;color:#000;'
            f'background:hsl({round(360 * part / drawn.count)},70%,75%)">{part}</span>'
            for part in drawn.parts.ravel()
        )
