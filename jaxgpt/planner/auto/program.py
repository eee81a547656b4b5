"""A traced program as a flat list of nodes between values: what the integer program chooses rules for.

Calls (jit, custom derivatives, recomputation) are opened. A scan stays a loop: what enters and leaves its body passes
through nodes of its own, which say how the place of a stack follows from that of its slices, and that what is handed
from turn to turn must come out as it went in.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

from jaxgpt.errors import UserError
from jaxgpt.planner.auto import rules
from jaxgpt.planner.auto.rules import Rule
from jaxgpt.sharding.jaxprs import inner, scan_of
from jaxgpt.sharding.sbp import B, P, Place, S

CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")
SAME = ("optimization_barrier", "name", "copy", "copy_p", "stop_gradient")
"""What hands its inputs on."""
LAYOUTS = ("shard_map", "sharding_constraint", "reshard", "mesh_cast", "psum", "all_gather", "all_to_all", "ppermute")


@dataclass(eq=False)
class Value:
    """An array of the program."""

    shape: tuple[int, ...]
    dtype: Any
    times: int
    """How often it is made: the product of the lengths of the loops around it."""
    name: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(self.dtype.itemsize)

    def slice(self) -> "Value":
        """What one turn adds to it, if it is a stack."""
        return Value(self.shape[1:], self.dtype, self.times, self.name)

    @property
    def nbytes(self) -> int:
        """Of the whole array."""
        return math.prod(self.shape) * self.itemsize


Atom = Value | Literal


@dataclass(eq=False)
class Node:
    """Something that has rules: an equation, an argument or result, an entrance to a loop or an exit."""

    name: str
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    rules: tuple[Rule, ...]
    """On one axis, whatever its size."""
    times: int = 1
    flops: float = 0.0
    equation: JaxprEqn | None = None
    known: bool = True
    """False for a primitive that only whole tensors are given to."""


@dataclass(eq=False)
class Loop:
    """A scan. Each part is one node for each of its arrays, in the scan's order."""

    length: int
    reverse: bool
    consts: list[Node]
    carry: list[Node]
    """Inputs: at the start, and after a turn. Outputs: in a turn, and at the end."""
    xs: list[Node]
    ys: list[Node]
    body: "list[Node | Loop]"


@dataclass(eq=False)
class Program:
    """A whole program."""

    arguments: list[Node]
    """One output each; the constants of the function come last."""
    steps: "list[Node | Loop]"
    results: list[Node]
    """One input each."""
    constants: list[Any] = field(default_factory=list)

    def nodes(self) -> list[Node]:
        """All of them, loops' bodies included."""
        return [*self.arguments, *_all(self.steps), *self.results]


def _all(steps: Sequence[Node | Loop]) -> Iterator[Node]:
    for step in steps:
        if isinstance(step, Node):
            yield step
        else:
            yield from (*step.consts, *step.carry, *step.xs, *_all(step.body), *step.ys)


def places(value: Any, partial: bool = True) -> list[Place]:
    """All places that a value may have on one axis."""
    sums = partial and jnp.issubdtype(value.dtype, jnp.inexact)
    return [B, *(S(d) for d in range(len(value.shape))), *((P,) if sums else ())]


def trace(f: Callable[..., Any], example: Sequence[Any], names: Sequence[str]) -> tuple[Program, Any]:
    """The program of f at arguments of these shapes, and the shapes of its results as f returns them.

    names: of the arguments' arrays, in the order of jax.tree.leaves.
    """
    structs = jax.tree.map(_struct, tuple(example))
    closed: Any
    closed, results = jax.make_jaxpr(f, return_shape=True)(*structs)
    opened: Jaxpr = getattr(closed, "jaxpr", closed)  # jax 0.12 made the two one
    jaxpr = dce_jaxpr(opened, [True] * len(opened.outvars), True)[0]
    constants = list(closed.consts)
    builder = _Builder()
    arrays = [
        *zip(jaxpr.invars, names, strict=True),
        *((var, f"constant.{i}") for i, var in enumerate(jaxpr.constvars)),
    ]
    environment: dict[Var, Atom] = {}
    arguments = []
    for var, name in arrays:
        value = builder.value(var.aval, 1, name)
        given = tuple(Rule((), (place,)) for place in places(value, partial=False))
        arguments.append(Node("argument", (), (value,), given))
        environment[var] = value
    steps: list[Node | Loop] = []
    out = builder.run(jaxpr, environment, steps, 1)
    made = [Node("result", (atom,), (), tuple(Rule((p,), ()) for p in _result_places(atom))) for atom in out]
    return Program(arguments, steps, made, constants), results


def _struct(array: Any) -> jax.ShapeDtypeStruct:
    """Shape and type alone: where an example lies says nothing."""
    return jax.ShapeDtypeStruct(jnp.shape(array), getattr(array, "dtype", None) or jnp.result_type(array))


def _result_places(atom: Atom) -> list[Place]:
    return places(atom, partial=False) if isinstance(atom, Value) else [B]


class _Builder:
    """Turns equations into nodes."""

    def value(self, aval: Any, times: int, name: str) -> Value:
        return Value(tuple(aval.shape), aval.dtype, times, name)

    def run(self, jaxpr: Jaxpr, environment: dict[Var, Atom], steps: list[Node | Loop], times: int) -> list[Atom]:
        """Adds the equations of a jaxpr whose inputs are in environment; returns its outputs."""

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, Literal) else environment[atom]

        for equation in jaxpr.eqns:
            name, inputs = equation.primitive.name, [read(atom) for atom in equation.invars]
            if name in LAYOUTS:
                raise UserError(f"auto_layout: {name} in the function says a layout of its own; give it one without")
            if name in SAME:
                outputs = inputs
            elif name in CALLS:
                outputs = self.call(equation, inputs, steps, times)
            elif name == "scan":
                outputs = self.loop(equation, inputs, steps, times)
            else:
                outputs = self.node(equation, inputs, steps, times)
            environment.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def call(self, equation: JaxprEqn, inputs: list[Atom], steps: list[Node | Loop], times: int) -> list[Atom]:
        """The equations of what is called, in its place."""
        body = next(equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params)
        consts = self.constants(body, times)
        body = getattr(body, "jaxpr", body)
        return self.run(body, {**consts, **dict(zip(body.invars, inputs, strict=True))}, steps, times)

    def constants(self, body: Any, times: int) -> dict[Var, Atom]:
        """A body's own constants, as literals."""
        values = getattr(body, "consts", ())
        jaxpr = getattr(body, "jaxpr", body)
        return {var: Literal(value, var.aval) for var, value in zip(jaxpr.constvars, values, strict=True)}

    def node(self, equation: JaxprEqn, inputs: list[Atom], steps: list[Node | Loop], times: int) -> list[Atom]:
        """One equation."""
        name = equation.primitive.name
        outputs = tuple(self.value(var.aval, times, name) for var in equation.outvars)
        found = rules.rules(equation)
        each = found or (rules.whole(equation),)
        known = found is not None or not inputs
        node = Node(name, tuple(inputs), outputs, each, times, _flops(equation), equation, known)
        steps.append(node)
        return list(outputs)

    def loop(self, equation: JaxprEqn, inputs: list[Atom], steps: list[Node | Loop], times: int) -> list[Atom]:
        """A scan."""
        scan = scan_of(equation)
        assert scan is not None
        (body, _), *_ = inner(equation)
        turns = times * scan.length
        environment = self.constants(equation.params["jaxpr"], turns)
        first = scan.consts + scan.carry
        parts = (inputs[: scan.consts], inputs[scan.consts : first], inputs[first:])
        variables = iter(body.invars)
        loop = Loop(scan.length, equation.params["reverse"], [], [], [], [], [])
        for part, atoms, shift in zip((loop.consts, loop.carry, loop.xs), parts, (0, 0, 1), strict=True):
            for atom in atoms:
                var = next(variables)
                value = self.value(var.aval, turns, "loop")
                environment[var] = value
                each = tuple(Rule((_shifted(place, shift),), (place,)) for place in places(value))
                part.append(Node("enter", (atom,), (value,), each, times))
        out = self.run(body, environment, loop.body, turns)
        for node, after in zip(loop.carry, out, strict=False):
            last = Value(node.outputs[0].shape, node.outputs[0].dtype, times, "loop")
            node.inputs, node.outputs = (*node.inputs, after), (*node.outputs, last)
            node.rules = tuple(Rule(rule.inputs * 2, rule.outputs * 2) for rule in node.rules)
        for var, atom in zip(equation.outvars[scan.carry :], out[scan.carry :], strict=True):
            stack = self.value(var.aval, times, "stack")
            one = self.value(var.aval, 1, "").slice()
            each = tuple(Rule((p,), (_shifted(p, 1),)) for p in places(one))
            loop.ys.append(Node("leave", (atom,), (stack,), each, turns))
        steps.append(loop)
        return [*(node.outputs[1] for node in loop.carry), *(node.outputs[0] for node in loop.ys)]


def _flops(equation: Any) -> float:
    """Multiplications and additions of a matrix product; 0 for the rest, which memory bounds."""
    if equation.primitive.name != "dot_general":
        return 0.0
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, result = (aval.shape for aval in (equation.invars[0].aval, equation.outvars[0].aval))
    return 2.0 * math.prod(result) * math.prod(left[d] for d in contracted)


def _shifted(place: Place, by: int) -> Place:
    return S(place.dim + by) if isinstance(place, S) else place
