"""The ledger: every collective of a traced program, predicted from its types before anything is compiled.

    for line in ledger(jax.jit(step).trace(*arguments).jaxpr, sizes):
        print(line.kind, line.axes, line.times * line.received, line.source)

Inside a shard_map a program says itself what it sends over the manual axes, and over the typed ones it follows from the
types (ledger_rules). A loop multiplies; of a cond the dearest branch is counted, as often as its scope says; what no
result needs is not, and what is sent twice alike is once.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxgpt.sharding.jaxprs import (
    Frame,
    Scan,
    Where,
    branches,
    hlo_dtype,
    inner,
    live,
    local_shape,
    producers,
    scan_of,
    share_of,
)
from jaxgpt.sharding.ledger_rules import Axes, Change, Sizes, changes

PHASES = ("gather", "reduce")
"""Name scopes of the step that are phases of their own."""

CASTS = ("convert_element_type", "pvary", "pcast")


@dataclass(frozen=True)
class Line:
    """One collective. Bytes are those of one device, each time it runs."""

    kind: str
    """As compiled programs name it: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute."""
    axes: Axes
    """Mesh axes whose devices talk, in the mesh's order; those of one device are left out."""
    change: str
    """Of signature, over these axes: "P -> B"; "max -> B" where it is not a sum."""
    dtype: str
    """As HLO names it, "bf16"."""
    shape: tuple[int, ...]
    """Of the array before the change, on one device."""
    operand: int
    """Bytes that go in."""
    result: int
    """Bytes that come out."""
    received: Fraction
    """Bytes that a device receives from others, by the ring algorithms."""
    times: int
    """How often a step runs it."""
    phase: str
    """forward, backward, recompute; or gather and reduce, of weights and gradients."""
    source: Frame | None
    """The line of jaxgpt that it comes from, the innermost one that is not a helper of sharding's ..."""
    frames: tuple[Frame, ...]
    """... and all of them, from the innermost."""
    assumed: bool
    """Whether no rule is known for the operation, and the compiler is taken to gather its operand."""
    merged: int = 0
    """How many further places of the program send the same array in the same way: compilers send it once."""


@dataclass(frozen=True)
class Total:
    """A sum of lines, times counted. Bytes a device and step."""

    times: int = 0
    result: int = 0
    received: Fraction = Fraction(0)

    def add(self, times: int, result: int, received: Fraction) -> "Total":
        """With one collective more."""
        return Total(self.times + times, self.result + times * result, self.received + times * received)


def ledger(program: Any, sizes: Sizes, moved: bool = False) -> list[Line]:
    """The communication of a traced program (a jaxpr) on a mesh of these sizes, in the order of the program.

    moved: count an all-reduce that a loop only adds up once, after the loop, where XLA puts it on GPUs. Raises
    ValueError for a collective that it does not know, and for one in a loop whose length is not in the program.
    """
    return _Reader(sizes, moved).read(live(program), Where())


def totals(lines: Sequence[Line]) -> dict[tuple[str, Axes], Total]:
    """The sums by kind and axes, the largest first."""
    found: dict[tuple[str, Axes], Total] = {}
    for line in lines:
        key = line.kind, line.axes
        found[key] = found.get(key, Total()).add(line.times, line.result, line.received)
    return dict(sorted(found.items(), key=lambda item: -item[1].received))


class _Reader:
    """Reads one computation: a program or a loop's body, with all that it calls."""

    def __init__(self, sizes: Sizes, moved: bool, scan: Scan | None = None) -> None:
        """scan: the loop whose body is read."""
        self.sizes, self.moved, self.scan = sizes, moved, scan
        self.added_up = _added_up(scan) if scan and moved else frozenset()
        self.lines: list[Line] = []
        self.values: dict[Var, Hashable] = {}
        """The same for variables that hold the same array, within a call and outside of it."""
        self.made: dict[Hashable, tuple[slice, list[Hashable]]] = {}
        """What communicates -> its lines and results."""

    def read(self, jaxpr: Jaxpr, where: Where) -> list[Line]:
        """The lines so far, with the program's."""
        for equation in jaxpr.eqns:
            alternatives, parts = branches(equation), inner(equation)
            self.values.update((v, object()) for v in equation.outvars)  # a program may be read for several calls
            if alternatives:
                each = [self._inside(equation, branch, share_of(equation), where) for branch in alternatives]
                self.lines += max(each, key=lambda lines: sum(line.times * line.received for line in lines))
            for part, times in parts:
                if equation.primitive.name in ("scan", "while"):
                    self.lines += self._inside(equation, part, times, where)
                else:
                    self._call(equation, part, where)
            if not alternatives and not parts:
                self._leaf(equation, where)
        return self.lines

    def _inside(self, equation: JaxprEqn, part: Jaxpr, times: Fraction | int | None, where: Where) -> list[Line]:
        """The lines of a computation of its own."""
        reader = _Reader(self.sizes, self.moved, scan_of(equation))
        lines = reader.read(part, where.enter(equation).repeated(times or 1))
        if times is None and lines:
            raise ValueError(f"{lines[0].source}: {lines[0].kind} in a loop of unknown length")
        return lines

    def _call(self, equation: JaxprEqn, part: Jaxpr, where: Where) -> None:
        """A program that compilers put in the place of the equation. What is recomputed is kept apart from the rest."""
        apart = equation.primitive.name.startswith(("remat", "checkpoint"))
        ins, outs = (equation.params.get(name) for name in ("in_specs", "out_specs"))  # of a shard_map
        for i, (ours, theirs) in enumerate(zip(part.invars, equation.invars, strict=True)):
            same = self._value(theirs) if ins is None else (self._value(theirs), str(ins[i]))
            self.values[ours] = object() if apart else same
        self.read(part, where.enter(equation))
        for i, (result, made) in enumerate(zip(equation.outvars, part.outvars, strict=True)):
            self.values[result] = self._value(made) if outs is None else (self._value(made), str(outs[i]))

    def _leaf(self, equation: JaxprEqn, where: Where) -> None:
        """An equation by itself. One that sends what another before it does is merged with that by compilers."""
        found = changes(equation, self.sizes)
        if not found:
            return
        key = (equation.primitive.name, tuple(map(self._value, equation.invars)), str(equation.params))
        if key in self.made:
            place, results = self.made[key]
            self.lines[place] = [replace(line, merged=line.merged + 1) for line in self.lines[place]]
            self.values.update(zip(equation.outvars, results, strict=True))
            return
        place = slice(len(self.lines), len(self.lines) + len(found))
        self.made[key] = place, [self._value(v) for v in equation.outvars]
        self.lines += [self._line(change, equation, where) for change in found]

    def _value(self, variable: Any) -> Hashable:
        return self.values.setdefault(variable, object()) if isinstance(variable, Var) else id(variable)

    def _line(self, change: Change, equation: JaxprEqn, where: Where) -> Line:
        once = change.cost.kind == "all-reduce" and equation.outvars[0] in self.added_up
        turns = self.scan.length if self.scan and once else 1
        return _line(change, where.enter(equation), turns, self.sizes)


def _line(change: Change, where: Where, turns: int, sizes: Sizes) -> Line:
    return Line(
        kind=change.cost.kind,
        axes=change.axes,
        change=change.text,
        dtype=hlo_dtype(change.aval),
        shape=local_shape(change.aval, sizes),
        operand=change.cost.operand,
        result=change.cost.result,
        received=change.cost.received,
        times=where.times // turns,
        phase=_phase(where.scopes),
        source=where.source,
        frames=where.frames,
        assumed=change.assumed,
    )


def _phase(scopes: tuple[str, ...]) -> str:
    named = [scope for scope in scopes if scope in PHASES]
    if named:
        return named[-1]
    if any("rematted" in scope for scope in scopes):
        return "recompute"
    return "backward" if any(scope.startswith("transpose(") for scope in scopes) else "forward"


def _added_up(scan: Scan) -> frozenset[Var]:
    """What a loop's body makes only to add it to what is carried, and reads nowhere else.

    XLA on GPUs (WhileLoopAllReduceCodeMotion) adds up an all-reduce's operands instead, and reduces after the loop.
    """
    made, found = producers(scan.body), set()
    uses = Counter(v for equation in scan.body.eqns for v in equation.invars if isinstance(v, Var))
    uses.update(v for v in scan.body.outvars if isinstance(v, Var))

    def follow(after: Var, before: Var | None) -> None:
        """Marks what reaches `after` through casts and sums with `before`, or with zero, alone."""
        equation = made.get(after)
        if equation is None or equation.primitive.name not in ("add", "add_any", *CASTS):
            return
        terms = [v for v in equation.invars if v is not before and isinstance(v, Var) and not _is_zero(v, made)]
        if len(terms) == 1 and uses[terms[0]] == 1 and (before is None or before in equation.invars):
            found.add(terms[0])
            follow(terms[0], None)

    carried = scan.body.invars[scan.consts : scan.consts + scan.carry]
    for before, after in zip(carried, scan.body.outvars, strict=False):
        if isinstance(after, Var) and uses[before] == 1:
            follow(after, before)
    return frozenset(found)


def _is_zero(value: Var, made: Mapping[Var, JaxprEqn]) -> bool:
    """Whether a value is zero everywhere, as the gradient of what a function does not use is."""
    equation = made.get(value)
    if equation is None or equation.primitive.name not in ("broadcast_in_dim", *CASTS):
        return False
    source = equation.invars[0]
    return _is_zero(source, made) if isinstance(source, Var) else not source.val
