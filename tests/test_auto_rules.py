"""The SBP rules of primitives: whatever a rule says of its equation is true, tried on the parts of two devices."""

from collections.abc import Callable
from typing import Any

import definition
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxgpt.planner.auto.program import Node, Value, trace
from jaxgpt.planner.auto.rules import Rule, leading, rules
from jaxgpt.planner.auto.run import evaluate
from jaxgpt.planner.auto.solve import Choice
from jaxgpt.sharding.sbp import B, P, Place, S, Signature

pytestmark = pytest.mark.core

AXIS, PARTS = "axis", 2
X = np.random.default_rng(0).integers(-9, 9, (4, 6, 8)).astype(np.float32)
Y = np.random.default_rng(1).integers(-9, 9, (4, 6, 8)).astype(np.float32)
TABLE = Y[0]
INDEX = np.array([[3, 0], [5, 2], [-4, 7], [1, 1]], np.int32)

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "add": (lax.add, (X, Y), 5),
    "add a scalar": (lambda x: x + jnp.float32(2), (X,), 5),
    "add of one": (lambda x, y: lax.add_p.bind(x, y), (X, Y[:, :1]), 5),
    "mul": (lax.mul, (X, Y), 6),
    "div": (lambda x, y: x / y, (X, abs(Y) + 1), 5),
    "tanh": (jnp.tanh, (X,), 4),
    "compare": (lax.lt, (X, Y), 4),
    "select": (lambda c, x, y: lax.select(c, x, y), (X > Y, X, Y), 5),
    "clamp": (lambda x: lax.clamp(-2.0, x, 2.0), (X,), 4),
    "cast": (lambda x: x.astype(jnp.int32), (X,), 4),
    "product": (lambda x, w: jnp.einsum("bsd,df->bsf", x, w), (X, Y[0].T), 7),
    "matmul": (lax.dot, (Y[0], Y[1].T), 6),
    "batched": (lambda x, y: jnp.einsum("bsd,btd->bst", x, y), (X, Y), 7),
    "sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), (X,), 5),
    "max": (lambda x: lax.reduce_max_p.bind(x, axes=(2,), out_sharding=None), (X,), 4),
    "argmax": (lambda x: lax.argmax(x, 2, jnp.int32), (X,), 3),
    "cumsum": (lambda x: lax.cumsum(x, 1), (X,), 4),
    "cummax": (lambda x: lax.cummax(x, 1), (X,), 3),
    "sort": (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), (X, Y), 3),
    "top_k": (lambda x: lax.top_k(x, 3), (X,), 3),
    "rev": (lambda x: lax.rev(x, (0,)), (X,), 4),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (4, 2, 6, 8), (0, 2, 3)), (X,), 6),
    "broadcast of one": (lambda x: lax.broadcast_in_dim(x, (4, 6), (0, 1)), (X[:, :1, 0],), 4),
    "iota": (lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1), (), 3),
    "merge": (lambda x: lax.reshape(x, (24, 8)), (X,), 4),
    "part": (lambda x: lax.reshape(x, (4, 2, 3, 8)), (X,), 5),
    "merge and part": (lambda x: lax.reshape(x, (4, 12, 4)), (X,), 4),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), (X,), 5),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (X[:, :1],), 4),
    "slice": (lambda x: lax.slice(x, (0, 1, 0), (4, 5, 8), (1, 2, 1)), (X,), 4),
    "dynamic slice": (lambda x, i: lax.dynamic_slice(x, (0, i, 0), (4, 2, 8)), (X, np.int32(3)), 4),
    "dynamic update": (lambda x, y, i: lax.dynamic_update_slice(x, y, (0, i, 0)), (X, Y[:, :2], np.int32(3)), 4),
    "pad": (lambda x: lax.pad(x, np.float32(3), ((0, 0, 0), (1, 2, 1), (0, 0, 0))), (X,), 4),
    "concatenate": (lambda x, y: lax.concatenate((x, y), 1), (X, Y), 4),
    "split": (lambda x: lax.split(x, (2, 4), 1), (X,), 4),
    "rows": (lambda t, i: t.at[i].get(mode="clip"), (TABLE, INDEX), 6),
    "rows or nothing": (lambda t, i: t.at[i].get(mode="fill"), (TABLE, INDEX * 3), 5),
    "rows or a number": (lambda t, i: t.at[i].get(mode="fill", fill_value=7.0), (TABLE, INDEX * 3), 5),
    "along": (lambda x, i: jnp.take_along_axis(x, i[:, :, None] % 8, 2, mode="clip"), (X[:, :2], abs(INDEX)), 5),
    "windows": (lambda x, i: jax.vmap(lambda k: lax.dynamic_slice(x, (0, k), (4, 2)))(i), (X[0, :4], INDEX[:, 0]), 1),
    "add to rows": (lambda t, i, x: t.at[i].add(x, mode="drop"), (TABLE, INDEX, X[:, :2, :8]), 6),
    "add to rows, clipped": (lambda t, i, x: t.at[i].add(x, mode="clip"), (TABLE, INDEX * 3, X[:, :2, :8]), 6),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rule_holds_on_parts(name: str) -> None:
    function, arguments, least = CASES[name]
    program, _ = trace(function, arguments, [str(i) for i in range(len(arguments))])
    given = [*arguments, *program.constants]
    values = {node.outputs[0]: np.asarray(x) for node, x in zip(program.arguments, given, strict=True)}
    tried: list[Rule] = []
    for node in program.steps:
        assert isinstance(node, Node) and node.known and node.equation is not None
        assert node.rules[0].inputs == (B,) * len(node.inputs)
        inputs = [values[x] if isinstance(x, Value) else np.asarray(x.val, x.aval.dtype) for x in node.inputs]
        found = node.equation.primitive.bind(*inputs, **node.equation.primitive.get_bind_params(node.equation.params))
        results = list(map(np.asarray, found if node.equation.primitive.multiple_results else [found]))
        values.update(zip(node.outputs, results, strict=True))
        tried = [rule for rule in node.rules if _fits(rule, (*inputs, *results))]
        for rule in tried:
            _holds(node, inputs, results, rule)
    assert len(tried) >= least, tried


def _fits(rule: Rule, arrays: tuple[np.ndarray, ...]) -> bool:
    places = zip(arrays, (*rule.inputs, *rule.outputs), strict=True)
    return all(not isinstance(p, S) or np.shape(a)[p.dim] % PARTS == 0 for a, p in places)


def _holds(node: Node, inputs: list[np.ndarray], results: list[np.ndarray], rule: Rule) -> None:
    """Runs the equation on the parts of each device, and puts the results together by the definition of SBP."""
    rng = np.random.default_rng(2)
    choice = Choice(_signatures(rule.inputs), _signatures(rule.outputs), {AXIS: rule})
    cut = [np.stack(definition.cut(x, p, PARTS, rng)) for x, p in zip(inputs, rule.inputs, strict=True)]
    run = jax.vmap(
        lambda *parts: tuple(evaluate(node, choice, list(parts), {AXIS: PARTS})), axis_name=AXIS, axis_size=PARTS
    )
    for place, parts, expected in zip(rule.outputs, run(*map(jnp.asarray, cut)), results, strict=True):
        joined = definition.join(list(np.asarray(parts)), place)
        np.testing.assert_allclose(joined, expected, rtol=1e-5, atol=1e-5, err_msg=str(rule))


def _signatures(places: tuple[Place, ...]) -> tuple[Signature, ...]:
    return tuple(Signature({AXIS: place}) for place in places)


def test_an_unknown_primitive_has_no_rules() -> None:
    equation = jax.make_jaxpr(lambda x: lax.while_loop(lambda s: s < 9, lambda s: s + 1, x))(1.0).jaxpr.eqns[-1]
    assert rules(equation) is None


def test_a_sum_of_whole_numbers_is_no_partial_sum() -> None:
    equation = jax.make_jaxpr(lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None))(INDEX).jaxpr.eqns[-1]
    assert all(P not in (*rule.inputs, *rule.outputs) for rule in rules(equation) or ())


def test_a_cast_that_rounds_is_not_linear() -> None:
    def outputs(new: Any) -> set[Place]:
        equation = jax.make_jaxpr(lambda x: lax.convert_element_type(x, new))(X.astype(jnp.float16)).jaxpr.eqns[-1]
        return {rule.outputs[0] for rule in rules(equation) or ()}

    assert P in outputs(jnp.float32)
    assert P not in outputs(jnp.bfloat16)


@pytest.mark.parametrize(
    ("old", "new", "pairs"),
    [
        ((4, 6), (24,), [(0, 0)]),
        ((24,), (4, 6), [(0, 0)]),
        ((1, 8), (8,), [(1, 0)]),
        ((2, 3, 4), (6, 2, 2), [(0, 0), (2, 1)]),
        ((4, 1, 6), (4, 6), [(0, 0), (2, 1)]),
        ((), (1, 1), []),
        ((4, 6), (6, 4), [(0, 0)]),
    ],
)
def test_leading_dimensions_of_a_reshape(old: Any, new: Any, pairs: Any) -> None:
    assert list(leading(old, new)) == pairs


def test_operations_of_a_product() -> None:
    program, _ = trace(lambda x, y: jnp.einsum("bsd,btd->bst", x, y), (X, Y), ("x", "y"))
    assert sum(node.flops for node in program.nodes()) == 2 * 4 * 6 * 6 * 8
