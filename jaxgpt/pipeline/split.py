"""A backward in two: what the input's gradient needs, and the rest, which makes the weights' gradients.

A zero-bubble schedule runs the two at different times (arXiv 2401.10241). The backward is traced; the equations on
which the input's gradient depends are the first part, all others the second, which is handed what the first made and
it needs. So neither repeats the other's work.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

Backward = Callable[[Any, jax.Array], tuple[Any, jax.Array]]
"""(arguments, dy) -> gradients of weights, gradient towards the input."""

CALLS = frozenset({"jit", "pjit", "checkpoint", "remat", "remat2", "closed_call"})
"""Primitives that only wrap a program: what is inside of them is split, too."""


class Split(NamedTuple):
    """to_input: (arguments, dy) -> gradient towards the input, and what the other part needs of this one.
    to_weights: (arguments, that) -> gradients of the weights."""

    to_input: Callable[[Any, jax.Array], tuple[jax.Array, list[jax.Array]]]
    to_weights: Callable[[Any, list[jax.Array]], Any]


def split(backward: Backward, arguments: Any, dy: jax.Array) -> Split:
    """The two parts of a backward, for arguments and dy of these types; their values are not looked at."""
    closed, (weights_like, _) = _flat(backward, arguments, dy)
    jaxpr, given = closed.jaxpr, closed.jaxpr.invars[: len(jax.tree.leaves(arguments))]
    *dweights, dx = jaxpr.outvars
    first = _needed(jaxpr.eqns, [dx])
    in_first = {id(equation) for equation in first}
    second = [equation for equation in _needed(jaxpr.eqns, dweights) if id(equation) not in in_first]
    known = {*given, *jaxpr.constvars, *(v for equation in second for v in equation.outvars)}
    handed = list(dict.fromkeys(v for v in (*_read(second), *_variables(dweights)) if v not in known))
    run_first = _function(closed, list(jaxpr.invars), [dx, *handed], first)
    run_second = _function(closed, [*given, *handed], dweights, second)

    def to_input(arguments: Any, dy: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        dx, *between = run_first(*jax.tree.leaves((arguments, dy)))
        return dx, between

    def to_weights(arguments: Any, between: list[jax.Array]) -> Any:
        found = run_second(*jax.tree.leaves(arguments), *between)
        return jax.tree.unflatten(jax.tree.structure(weights_like), found)

    return Split(to_input, to_weights)


def _flat(function: Callable[..., Any], *arguments: Any) -> tuple[ClosedJaxpr, Any]:
    """The function as one program without calls, and the shapes of its results."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    without = ClosedJaxpr(Jaxpr([], [], [], [], debug_info=closed.jaxpr.debug_info.with_unknown_names()), [])

    def run(jaxpr: Jaxpr, consts: Iterable[Any], *values: Any) -> list[Any]:
        env: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= dict(zip(jaxpr.invars, values, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, Literal) else env[v]

        for equation in jaxpr.eqns:
            if equation.primitive.name in CALLS:
                inner: Any = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
                program, constants = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
                outputs = run(program, constants, *(read(v) for v in equation.invars))
            else:
                needed = _read([equation])
                outputs = _function(without, needed, list(equation.outvars), [equation])(*(env[v] for v in needed))
            env |= dict(zip(equation.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    leaves = jax.tree.leaves(arguments)
    return jax.make_jaxpr(lambda *a: run(closed.jaxpr, closed.consts, *a))(*leaves), shapes


def _function(
    closed: ClosedJaxpr, inputs: list[Any], outputs: list[Any], equations: list[JaxprEqn]
) -> Callable[..., Any]:
    """The equations alone as a function of these variables; constants are closed's."""
    program = Jaxpr(closed.jaxpr.constvars, inputs, outputs, equations, debug_info=_unnamed(closed))
    return jaxpr_as_fun(ClosedJaxpr(program, closed.consts))


def _unnamed(closed: ClosedJaxpr) -> Any:
    return closed.jaxpr.debug_info.with_unknown_names()


def _needed(equations: Iterable[JaxprEqn], outputs: list[Any]) -> list[JaxprEqn]:
    """The equations on which the outputs depend, in order."""
    wanted, kept = set(_variables(outputs)), []
    for equation in reversed(list(equations)):
        if wanted & set(equation.outvars):
            kept.append(equation)
            wanted |= set(_read([equation]))
    return kept[::-1]


def _read(equations: Iterable[JaxprEqn]) -> list[Var]:
    """The variables that equations read."""
    return list(dict.fromkeys(v for equation in equations for v in _variables(equation.invars)))


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
