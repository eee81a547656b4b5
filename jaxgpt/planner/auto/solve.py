"""The choice of a rule for every node of a program, by an integer program.

What is minimized is one device's seconds:

- for a node, its matrix product's operations over the peak rate, and the bytes of its results over the memory's
  bandwidth, each divided by the devices among which the rule divides the work: what is B is computed whole everywhere;
- for a value, the bytes that boxing receives over the link's bandwidth and the link's delay for each collective. A
  value is changed once for each signature in which it is wanted, whoever wants it; a part of what is held is free;
- for an argument, its bytes on a device, where a price is set on them.

One variable says that a node takes a choice, another that a value made in one signature is wanted in another. The
second sum up to the first on either side, so that on a tree the linear program alone is exact, and the rest is little
work. Alpa (arXiv 2201.12023) chooses in a like way; here the choices are SBP rules and the costs those of boxing.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from jaxgpt.errors import UserError
from jaxgpt.planner.auto.program import Node, Program, Value
from jaxgpt.planner.auto.rules import Rule
from jaxgpt.planner.hardware import Dtype, Hardware
from jaxgpt.sharding.boxing import cost, path
from jaxgpt.sharding.sbp import B, P, Signature, splits

COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "reduce-scatter")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device does in a second."""

    flops: float
    """Additions and multiplications of matrix products."""
    memory: float
    """Bytes of results written."""
    link: float
    """Bytes received from other devices."""
    delay: float
    """Seconds that a collective takes however few its bytes."""

    @staticmethod
    def of(hardware: Hardware, dtype: Dtype) -> "Rates":
        """What hardware reaches with large arrays, inside of a host."""
        reached = hardware.efficiency
        return Rates(
            flops=hardware.peak(dtype) * reached.products,
            memory=hardware.bandwidth * reached.memory,
            link=hardware.inside.bandwidth * reached.inside,
            delay=hardware.inside.latency,
        )


@dataclass(frozen=True)
class Choice:
    """A node's signatures, from one rule on each axis."""

    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]
    rules: Mapping[str, Rule]


@dataclass(frozen=True)
class Box:
    """A value's change of signature, and what it costs each time."""

    value: Value
    source: Signature
    target: Signature
    received: Fraction
    """Bytes that one device receives."""
    kinds: tuple[str, ...]
    """The collectives, in order."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A program on a mesh, with what is given."""

    program: Program
    sizes: Mapping[str, int]
    """Devices along each axis."""
    rates: Rates
    capacity: float | int = math.inf
    """Most bytes of arguments on a device."""
    price: float | int = 0
    """Seconds for each byte of arguments on a device."""
    limit: float | int = math.inf
    """Seconds after which the solver gives the best that it has found."""
    allowed: Callable[[Node, Choice], bool] = lambda node, choice: True
    """Whether a node may take a choice, as far as the user has said."""
    tied: Sequence[tuple[Node, Node]] = ()
    """Arguments and results that must have the same signature."""

    def seconds(self, node: Node, choice: Choice) -> float:
        """Of a node's work on one device, all its turns."""
        parts = math.prod(self.sizes[axis] for axis, rule in choice.rules.items() if rule.divided)
        total = node.flops / parts / self.rates.flops
        if node.equation is not None:
            for value, signature in zip(node.outputs, choice.outputs, strict=True):
                total += self.held(value, signature) / self.rates.memory
        elif node.name == "argument":
            total += self.price * self.held(node.outputs[0], choice.outputs[0])
        received, count = self.inside(node, choice)
        return node.times * (total + float(received) / self.rates.link + count * self.rates.delay)

    def inside(self, node: Node, choice: Choice) -> tuple[Fraction, int]:
        """Bytes received in the all-reduces that belong to an equation, each time, and how many there are."""
        axes = [axis for axis, rule in choice.rules.items() if rule.inside]
        if not axes:
            return Fraction(0), 0
        group = math.prod(self.sizes[axis] for axis in axes)
        return cost(P, B, self.held(node.outputs[0], choice.outputs[0]), group).received, 1

    def held(self, value: Value, signature: Signature) -> int:
        """Bytes of a value on one device."""
        return value.nbytes // math.prod(splits(signature, self.sizes).values())

    def box(self, value: Value, source: Signature, target: Signature) -> Box:
        """The change along boxing's path."""
        return Box(value, source, target, *_way(source, target, value.shape, value.itemsize, tuple(self.sizes.items())))

    def box_seconds(self, box: Box) -> float:
        """Of a change, all its turns."""
        return box.value.times * (float(box.received) / self.rates.link + len(box.kinds) * self.rates.delay)

    def choices(self, node: Node, axes: Iterable[str], before: Choice | None = None) -> list[Choice]:
        """Every choice of a node over these axes; before: what it has already taken on others."""
        axes, found = list(axes), []
        taken = dict(before.rules) if before else {}
        for combination in itertools.product(node.rules, repeat=len(axes)):
            given = taken | dict(zip(axes, combination, strict=True))
            each = {axis: given[axis] for axis in self.sizes if axis in given}
            inputs = [Signature({axis: r.inputs[i] for axis, r in each.items()}) for i in range(len(node.inputs))]
            outputs = [Signature({axis: r.outputs[i] for axis, r in each.items()}) for i in range(len(node.outputs))]
            choice = Choice(tuple(inputs), tuple(outputs), each)
            if self._divides(node, choice) and self.allowed(node, choice):
                found.append(choice)
        return found

    def _divides(self, node: Node, choice: Choice) -> bool:
        atoms = zip((*node.inputs, *node.outputs), (*choice.inputs, *choice.outputs), strict=True)
        for atom, signature in atoms:
            shape = atom.shape if isinstance(atom, Value) else np.shape(atom.val)
            if any(shape[dim] % parts for dim, parts in splits(signature, self.sizes).items()):
                return False
        return True


@dataclass(frozen=True)
class Solution:
    """What was chosen."""

    chosen: Mapping[Node, Choice]
    boxes: Mapping[Value, list[Box]]
    seconds: float
    exact: bool
    """Whether nothing is better by more than GAP: all axes were chosen together, and the solver came to its end."""


GAP = 1e-4
"""Relative difference from the optimum at which the solver stops."""
MOST = 10_000
"""Changes of values up to which all axes are chosen together."""


def solve(problem: Problem) -> Solution:
    """The best choice; axes of one device take no part. Raises UserError where nothing satisfies what is given."""
    axes = [axis for axis, size in problem.sizes.items() if size > 1]
    every = sum(len(node.rules) ** (2 * len(axes)) for node in problem.program.nodes() if node.outputs)
    exact = len(axes) < 2 or every < MOST
    chosen: dict[Node, Choice] = {}
    for number, group in enumerate([axes] if exact else [[axis] for axis in axes], 1):
        rest = 1 if exact else math.prod(problem.sizes[axis] for axis in axes[number:])
        choices = {node: problem.choices(node, group, chosen.get(node)) for node in problem.program.nodes()}
        solution = _Integer(problem, choices, problem.capacity * rest).solve()
        chosen = dict(solution.chosen)
    return Solution(solution.chosen, solution.boxes, solution.seconds, exact and solution.exact)


@functools.lru_cache(maxsize=1 << 16)
def _way(
    source: Signature, target: Signature, shape: tuple[int, ...], itemsize: int, sizes: tuple[tuple[str, int], ...]
) -> tuple[Fraction, tuple[str, ...]]:
    """Bytes received on the path, and its collectives."""
    steps = path(source, target, shape, itemsize, dict(sizes))
    kinds = tuple(step.cost.kind for step in steps if step.cost.kind in COLLECTIVES)
    return sum((step.cost.received for step in steps), Fraction(0)), kinds


class _Integer:
    """The integer program: its columns, rows, and what a solution says."""

    def __init__(self, problem: Problem, choices: Mapping[Node, list[Choice]], capacity: float | int) -> None:
        self.problem, self.choices = problem, choices
        self.several = int(sum(size > 1 for size in problem.sizes.values()) > 1)
        """On several axes a change must be said to be whole: parts of different kinds could make up one."""
        self.prices: list[float] = []
        self.integral: list[int] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self.column: dict[tuple[Node, int], int] = {}
        self.made: dict[Value, dict[Signature, list[int]]] = {}
        self.wanted: dict[Value, list[dict[Signature, list[int]]]] = defaultdict(list)
        self.change: dict[int, Box] = {}
        for node, each in choices.items():
            self._node(node, each)
        for value, sources in self.made.items():
            self._value(value, sources)
        if math.isfinite(capacity):
            self._capacity(capacity)
        for argument, result in problem.tied:
            self._tie(argument, result)

    def _add(self, price: float, integral: int) -> int:
        self.prices.append(price)
        self.integral.append(integral)
        return len(self.prices) - 1

    def _node(self, node: Node, each: list[Choice]) -> None:
        """One choice for each node, by its signatures sorted under the values that it makes and wants."""
        if not each:
            name = node.outputs[0].name if node.name == "argument" else node.name
            raise UserError(f"auto_layout: what is fixed leaves no layout for {name}; fix less, or other dimensions")
        columns = [self._add(self.problem.seconds(node, choice), 1) for choice in each]
        self.rows.append((dict.fromkeys(columns, 1.0), 1.0, 1.0))
        for i, column in enumerate(columns):
            self.column[node, i] = column
        for position, value in enumerate(node.outputs):
            self.made[value] = _grouped([choice.outputs[position] for choice in each], columns)
        for position, atom in enumerate(node.inputs):
            if isinstance(atom, Value):
                self.wanted[atom].append(_grouped([choice.inputs[position] for choice in each], columns))

    def _value(self, value: Value, sources: dict[Signature, list[int]]) -> None:
        """Every consumer's want is met from what is made: (made, wanted) pairs whose sums over either are the choices.

        A change that several want is paid for once: either it, or one into a signature of which it is a part.
        """
        wants = self.wanted[value]
        targets = dict.fromkeys([*(target for want in wants for target in want), Signature()])
        boxes = {(s, t): self.problem.box(value, s, t) for s in {**sources, **targets} for t in targets}
        shared: dict[tuple[Signature, Signature], int] = {}
        if len(wants) > 1:
            paid = [(s, t) for s in sources for t in targets if boxes[s, t].kinds]
            shared = {pair: self._box(boxes[pair], self.several) for pair in paid}
        for want in wants:
            pairs: dict[tuple[Signature, Signature], int] = {}
            for source, target in itertools.product(sources, want):
                box = boxes[source, target]
                pairs[source, target] = self._box(box, 0) if box.kinds and not shared else self._add(0.0, 0)
                if box.kinds and shared:
                    ways = {shared[p]: -1.0 for p in shared if p[0] == source and not boxes[p[1], target].kinds}
                    self.rows.append(({pairs[source, target]: 1.0, **ways}, -np.inf, 0.0))
            for side, columns in ((0, sources), (1, want)):
                for signature, chosen in columns.items():
                    row = {column: 1.0 for pair, column in pairs.items() if pair[side] == signature}
                    self.rows.append((row | dict.fromkeys(chosen, -1.0), 0.0, 0.0))

    def _box(self, box: Box, integral: int) -> int:
        column = self._add(self.problem.box_seconds(box), integral)
        self.change[column] = box
        return column

    def _capacity(self, capacity: float | int) -> None:
        held = {
            self.column[node, i]: float(self.problem.held(node.outputs[0], choice.outputs[0]))
            for node in self.problem.program.arguments
            for i, choice in enumerate(self.choices[node])
        }
        self.rows.append(({column: n / capacity for column, n in held.items()}, -np.inf, 1.0))

    def _tie(self, argument: Node, result: Node) -> None:
        ours = _grouped([c.outputs[0] for c in self.choices[argument]], self._columns(argument))
        theirs = _grouped([c.inputs[0] for c in self.choices[result]], self._columns(result))
        for signature in {**ours, **theirs}:
            equal = dict.fromkeys(ours.get(signature, []), 1.0) | dict.fromkeys(theirs.get(signature, []), -1.0)
            self.rows.append((equal, 0.0, 0.0))

    def _columns(self, node: Node) -> list[int]:
        return [self.column[node, i] for i in range(len(self.choices[node]))]

    def solve(self) -> Solution:
        """Hands it to scipy's HiGHS."""
        prices = np.array(self.prices)
        scale = prices.max() / 1e4 or 1.0  # the solver's tolerances are absolute
        entries = [(row, column, x) for row, (each, _, _) in enumerate(self.rows) for column, x in each.items()]
        i, j, x = (np.array(part) for part in zip(*entries, strict=True))
        matrix = csr_array((x, (i, j)), shape=(len(self.rows), len(prices)))
        limits = LinearConstraint(matrix, [row[1] for row in self.rows], [row[2] for row in self.rows])
        found = milp(
            prices / scale,
            integrality=np.array(self.integral),
            bounds=Bounds(0, 1),
            constraints=limits,
            options={"mip_rel_gap": GAP, "time_limit": self.problem.limit},
        )
        if found.x is None:
            if found.status == 1:
                raise UserError(f"auto_layout: no layout was found in {self.problem.limit:g} s; raise the limit")
            if found.status != 2:
                raise RuntimeError(f"the integer program's solver ended with: {found.message}")
            limit = self.problem.capacity
            why = f" in {limit:.0f} bytes of arguments a device" if math.isfinite(limit) else ""
            raise UserError(f"auto_layout: no layout satisfies what is given{why}; raise the capacity, fix or tie less")
        return self._read(found.x > 0.5, float(prices @ np.round(found.x)), found.status == 0)

    def _read(self, taken: np.ndarray, seconds: float, proved: bool) -> Solution:
        chosen = {node: self.choices[node][i] for (node, i), column in self.column.items() if taken[column]}
        made = {v: s for node, c in chosen.items() for v, s in zip(node.outputs, c.outputs, strict=True)}
        boxes: dict[Value, list[Box]] = defaultdict(list)
        for column, box in self.change.items():
            if taken[column] and box.source == made[box.value]:  # a solver that is stopped may pay for idle changes
                boxes[box.value].append(box)
        return Solution(chosen, boxes, seconds, proved)


def _grouped(signatures: Sequence[Signature], columns: Sequence[int]) -> dict[Signature, list[int]]:
    found: dict[Signature, list[int]] = {}
    for signature, column in zip(signatures, columns, strict=True):
        found.setdefault(signature, []).append(column)
    return found
