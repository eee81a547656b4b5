"""What a step holds besides its state: activations kept from forward to backward, and what its loops carry.

Both are read from the traced program. An array is kept where one scan stacks it, a slice a turn, and another reads it:
the blocks' forward and their backward.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxgpt.sharding.jaxprs import (
    Frame,
    Where,
    hlo_dtype,
    inner,
    live,
    local_bytes,
    local_shape,
    producers,
    scan_of,
    signature,
)
from jaxgpt.sharding.ledger_rules import Sizes
from jaxgpt.sharding.sbp import Signature


@dataclass(frozen=True)
class Kept:
    """An array that a loop stacks for a later one. Shapes and bytes are of one turn (one block)."""

    name: str
    """As checkpoint_name gave it; "input" of what the loop carries; else the operation that made it."""
    dtype: str
    """As HLO names it, "bf16"."""
    shape: tuple[int, ...]
    """Over the typed axes the whole, over manual ones a device's part."""
    local: tuple[int, ...]
    """On one device."""
    signature: Signature
    """On the typed axes."""
    varying: tuple[str, ...]
    """Manual axes over which devices hold different ones."""
    nbytes: int
    """On one device."""
    turns: int
    """How many are stacked."""
    source: Frame | None
    """The line that makes it."""


@dataclass(frozen=True)
class Loop:
    """A scan of the program, and bytes on one device of what is there as long as it runs."""

    source: Frame | None
    turns: int
    carried: int
    """Handed from turn to turn: gradients, in the loop over the microbatches."""
    constant: int
    """Read in every turn: weights, there."""


def kept(program: Any, sizes: Sizes) -> list[Kept]:
    """What loops of a traced program (a jaxpr) stack for later ones, on a mesh of these sizes."""
    return [each for jaxpr, where in _programs(live(program), Where()) for each in _kept(jaxpr, where, sizes)]


def outer_loops(program: Any, sizes: Sizes) -> list[Loop]:
    """The loops that are in no other."""
    return list(_outer(live(program), Where(), sizes))


def _programs(jaxpr: Jaxpr, where: Where) -> Iterator[tuple[Jaxpr, Where]]:
    """A program and all that run inside of it."""
    yield jaxpr, where
    for equation in jaxpr.eqns:
        for part, _ in inner(equation):
            yield from _programs(part, where.enter(equation))


def _outer(jaxpr: Jaxpr, where: Where, sizes: Sizes) -> Iterator[Loop]:
    for equation in jaxpr.eqns:
        scan, here = scan_of(equation), where.enter(equation)
        if scan is None:
            for part, _ in inner(equation):
                yield from _outer(part, here, sizes)
            continue
        held = [local_bytes(v.aval, sizes) for v in equation.invars]
        source = here.frames[0] if here.frames else None
        yield Loop(source, scan.length, sum(held[scan.consts :][: scan.carry]), sum(held[: scan.consts]))


def _kept(jaxpr: Jaxpr, where: Where, sizes: Sizes) -> Iterator[Kept]:
    scans = [(equation, scan) for equation in jaxpr.eqns if (scan := scan_of(equation))]
    read = {v for equation, scan in scans for v in equation.invars[scan.consts + scan.carry :] if isinstance(v, Var)}
    for equation, scan in scans:
        made = producers(scan.body)
        for stacked, each in zip(equation.outvars[scan.carry :], scan.body.outvars[scan.carry :], strict=True):
            if stacked in read and isinstance(each, Var):
                name, maker = _origin(each, scan.body, made)
                source = where.enter(equation).enter(maker).source if maker else where.enter(equation).source
                aval: Any = each.aval
                yield Kept(
                    name=name,
                    dtype=hlo_dtype(aval),
                    shape=tuple(aval.shape),
                    local=local_shape(aval, sizes),
                    signature=signature(aval),
                    varying=tuple(a for a in sizes if a in aval.manual_axis_type.varying),
                    nbytes=local_bytes(aval, sizes),
                    turns=scan.length,
                    source=source,
                )


def _origin(value: Var, body: Jaxpr, made: Mapping[Var, JaxprEqn]) -> tuple[str, JaxprEqn | None]:
    """A value's name, and the equation that makes it."""
    maker = made.get(value)
    if maker is None:
        return "input", None
    if maker.primitive.name == "name":
        return maker.params["name"], maker
    if maker.primitive.name == "reduce_precision" and isinstance(maker.invars[0], Var):  # what recomputation adds
        return _origin(maker.invars[0], body, made)
    parts = inner(maker)
    if len(parts) == 1 and len(parts[0][0].outvars) == len(maker.outvars):
        result = parts[0][0].outvars[maker.outvars.index(value)]
        if isinstance(result, Var):
            name, _ = _origin(result, parts[0][0], producers(parts[0][0]))
            return name, maker
    return maker.primitive.name, maker
