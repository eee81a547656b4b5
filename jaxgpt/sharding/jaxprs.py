"""Reading a traced program: which of its equations live, what runs inside them how often, where each comes from, and
how each array lies on the mesh.

    program = live(jax.jit(step).trace(*arguments).jaxpr)

A jaxpr is JAX's typed program. Inside a shard_map a shape is what one device of the manual axes holds; over the typed
axes (AxisType.Explicit) it is the whole, and the type says where that lies.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from jaxgpt.sharding.sbp import Signature

PACKAGE = f"{Path(__file__).parents[1]}/"


@dataclass(frozen=True)
class Frame:
    """A line of jaxgpt that a program comes from."""

    file: str
    """Within the package, "training/step.py"."""
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


@dataclass(frozen=True)
class Where:
    """A place in a program: inside which loops, scopes and lines."""

    times: int = 1
    """How often it runs."""
    scopes: tuple[str, ...] = ()
    """Name scopes and transformations, from the outermost: ("reduce", "transpose(jvp(mlp))")."""
    frames: tuple[Frame, ...] = ()
    """Lines, from the innermost."""

    def enter(self, equation: JaxprEqn) -> "Where":
        """The place of an equation that stands here."""
        scopes = [scope for scope in str(equation.source_info.name_stack).split("/") if scope]
        frames = dict.fromkeys((*_frames(equation), *self.frames))
        return Where(self.times, (*self.scopes, *scopes), tuple(frames))

    @property
    def source(self) -> Frame | None:
        """The innermost line that is not one of sharding's helpers."""
        return next(iter([*(f for f in self.frames if not f.file.startswith("sharding/")), *self.frames]), None)

    def repeated(self, times: Fraction | int) -> "Where":
        """The same place inside of a loop, or of what runs in a share of its turns."""
        return Where(int(self.times * times), self.scopes, self.frames)


def _frames(equation: JaxprEqn) -> Iterator[Frame]:
    traceback: Any = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if frame.file_name.startswith(PACKAGE):
            yield Frame(frame.file_name.removeprefix(PACKAGE), frame.line_num, _short(frame.function_name))


def _short(function: str) -> str:
    """ "Stage.backward.<locals>.step" as "Stage.backward.step"; of a lambda or comprehension, what it stands in."""
    parts = [part for part in function.split(".") if part != "<locals>"]
    while len(parts) > 1 and parts[-1].startswith("<"):
        parts.pop()
    return ".".join(parts)


def live(program: Any) -> Jaxpr:
    """The program without what none of its results need, all the way in: what a compiler would drop, too."""
    jaxpr: Jaxpr = getattr(program, "jaxpr", program)  # a ClosedJaxpr, until jax 0.12 made the two one
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


SHARE = re.compile(r"(\d+) of (\d+) turns")


def share(runs: int, turns: int) -> str:
    """The name scope of a cond whose first branch runs in some of a loop's turns only, the other otherwise."""
    return f"{runs} of {turns} turns"


def share_of(equation: JaxprEqn) -> Fraction:
    """In which share of the turns of the loop around it a cond's dearest branch runs, by its name scope; or in all."""
    found = SHARE.fullmatch(str(equation.source_info.name_stack).rpartition("/")[2])
    return Fraction(int(found[1]), int(found[2])) if found else Fraction(1)


def branches(equation: JaxprEqn) -> tuple[Jaxpr, ...]:
    """Of a cond: the programs of which one runs."""
    if equation.primitive.name != "cond":
        return ()
    return tuple(getattr(branch, "jaxpr", branch) for branch in equation.params["branches"])


def inner(equation: JaxprEqn) -> list[tuple[Jaxpr, int | None]]:
    """The programs that run inside of an equation, each with how often; None: nobody knows before it runs.

    Not a cond's branches, nor what scatters and reductions combine two numbers with.
    """
    name, params = equation.primitive.name, equation.params
    if name == "cond" or name.startswith(("scatter", "reduce", "select_and")):
        return []
    times = {"scan": params.get("length"), "while": None}.get(name, 1)
    return [(jaxpr, times) for jaxpr in jaxprs_in_params(params)]


# Scans


@dataclass(frozen=True)
class Scan:
    """A loop of known length: body's inputs are consts, carry, xs, its results carry, ys."""

    body: Jaxpr
    length: int
    consts: int
    """How many of the inputs are the same in every turn ..."""
    carry: int
    """... and how many are handed from turn to turn; the rest is a slice of what is stacked."""


def scan_of(equation: JaxprEqn) -> Scan | None:
    """The equation as a scan, if it is one."""
    if equation.primitive.name != "scan":
        return None
    params = equation.params
    if "ft_in" in params:  # since jax 0.12, in place of two numbers
        consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
    else:
        consts, carry = params["num_consts"], params["num_carry"]
    return Scan(inner(equation)[0][0], params["length"], consts, carry)


def producers(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
    """Variable -> the equation that makes it."""
    return {var: equation for equation in jaxpr.eqns for var in equation.outvars}


# Types


def signature(aval: Any) -> Signature:
    """How an array lies on the axes of which its type speaks; inside a shard_map those that are not manual."""
    return Signature.from_spec(aval.sharding.spec, ())


def local_shape(aval: Any, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of an array on one device; sizes: devices along each axis."""
    found = signature(aval)
    return tuple(n // math.prod(sizes[a] for a in found.split(dim)) for dim, n in enumerate(aval.shape))


def local_bytes(aval: Any, sizes: Mapping[str, int]) -> int:
    """Bytes of an array on one device."""
    return math.prod(local_shape(aval, sizes)) * int(aval.dtype.itemsize)


def hlo_dtype(aval: Any) -> str:
    """An array's type as HLO names it: "bf16"."""
    name = str(aval.dtype)
    for numpy, hlo in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"), ("bool", "pred")):
        if name.startswith(numpy):
            return hlo + name.removeprefix(numpy)
    return name
