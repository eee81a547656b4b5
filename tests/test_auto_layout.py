"""The integer program: Megatron's split found, the optimum of brute force, and layouts that run as they say."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import definition
import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
from jax import lax
from tiny import GPT

from jaxgpt import auto_layout
from jaxgpt.config import ModelConfig
from jaxgpt.errors import UserError
from jaxgpt.model import gpt
from jaxgpt.model.parameters import parameters
from jaxgpt.planner.auto.layout import Laid
from jaxgpt.planner.auto.program import Value, trace
from jaxgpt.planner.auto.solve import Problem, Rates, solve
from jaxgpt.sharding.hlo import collectives
from jaxgpt.sharding.sbp import B, S, Signature

pytestmark = pytest.mark.core

RATES = Rates(flops=1e15, memory=1e13, link=1e9, delay=1e-9)
"""Links so slow that bytes decide."""
BLOCK = ModelConfig(layers=1, width=64, heads=4, seq=16, vocab=16)
TENSOR = 4


def block(weights: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """The model's own transformer block."""
    length = x.shape[1]
    at = gpt.context(BLOCK, jnp.arange(x.shape[0]), jnp.arange(length), jnp.zeros(2, jnp.uint32))
    return gpt.block(BLOCK, "xla", weights, x, jnp.int32(0), at)


def block_weights(rng: np.random.Generator) -> dict[str, jax.Array]:
    """Weights in the form that the block takes, not at their start."""
    width, heads, head, mlp = BLOCK.width, BLOCK.heads, BLOCK.width // BLOCK.heads, BLOCK.mlp
    shapes = {
        "norm1.scale": (width,),
        "norm1.bias": (width,),
        "attention.qkv.weight": (width, heads, 3, head),
        "attention.qkv.bias": (heads, 3, head),
        "attention.out.weight": (heads, head, width),
        "attention.out.bias": (width,),
        "norm2.scale": (width,),
        "norm2.bias": (width,),
        "mlp.in.weight": (width, mlp),
        "mlp.in.bias": (mlp,),
        "mlp.down.weight": (mlp, width),
        "mlp.down.bias": (width,),
    }
    return {name: jnp.asarray(rng.normal(0, 0.1, shape), jnp.float32) for name, shape in shapes.items()}


MATRICES = {
    "attention.qkv.weight": S(1),
    "attention.out.weight": S(0),
    "mlp.in.weight": S(1),
    "mlp.down.weight": S(0),
}
"""Megatron's split of a block: columns, then rows (arXiv 1909.08053)."""


def once(weights: Mapping[str, jax.Array], parts: int) -> float:
    """Capacity in which every matrix fits once over the devices, and all vectors on each."""
    return sum(w.nbytes / (parts if name in MATRICES else 1) for name, w in weights.items())


def agrees(laid: Laid, *arguments: Any) -> None:
    """Results as on one device to 1e-5, and a compiled program that receives no more than was said."""
    placed = jax.device_put(arguments, laid.shardings)
    compiled = laid.compiled_call.lower(*placed).compile({"xla_backend_optimization_level": 0})
    results, expected = compiled(*placed), jax.jit(laid.function)(*arguments)
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    largest = max(float(abs(single).max()) for single in jax.tree.leaves(expected))
    for mine, single in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == single.dtype
        scale = max(1e-5 * float(abs(single).max()), 1e-7 * largest)  # a key's bias has no gradient but rounding
        np.testing.assert_allclose(mine, single, rtol=1e-5, atol=scale)
    found = collectives(compiled.as_text())
    assert all(one.exact for one in found)
    assert sum(one.times * one.received for one in found) <= laid.received


# Megatron's split


@pytest.mark.parametrize("batch", [1, 2])
def test_a_block_is_split_as_megatron_does(batch: int) -> None:
    """With batch 2 the data axis is there and the batch on it; the tensor axis is free to split it, too."""
    rng = np.random.default_rng(0)
    weights, x = block_weights(rng), jnp.asarray(rng.normal(size=(batch, BLOCK.seq, BLOCK.width)), jnp.float32)
    mesh = definition.mesh({"data": batch, "tensor": TENSOR})
    given = {"data": S(0), "tensor": B} if batch > 1 else {"tensor": B}
    fixed = {"x": given, "result": given, "weights": {"data": B}}
    laid = auto_layout(
        block, weights, x, mesh=mesh, fixed=fixed, capacity=once(weights, TENSOR) + x.nbytes / batch, hardware=RATES
    )
    for name, place in MATRICES.items():
        assert laid.layouts[f"weights.{name}"]["tensor"] == place, name
    activations = BLOCK.seq * BLOCK.width * 4
    assert laid.received == 2 * 2 * activations * (TENSOR - 1) // TENSOR
    assert laid.unknown == [] and laid.solution.exact == (batch == 1)
    agrees(laid, weights, x)


def test_forward_and_backward_are_split_as_megatron_does() -> None:
    """The feed-forward half of a block, with the gradients of its weights and its input."""
    rng = np.random.default_rng(1)
    weights = {n: w for n, w in block_weights(rng).items() if n.startswith(("norm2", "mlp"))}
    x, dy = (jnp.asarray(rng.normal(size=(1, 16, 64)), jnp.float32) for _ in range(2))

    def half(w: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        h = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w["norm2.scale"] + w["norm2.bias"]
        return x + jax.nn.gelu(h @ w["mlp.in.weight"] + w["mlp.in.bias"]) @ w["mlp.down.weight"] + w["mlp.down.bias"]

    def step(weights: Mapping[str, jax.Array], x: jax.Array, dy: jax.Array) -> Any:
        y, back = jax.vjp(half, weights, x)
        return y, *back(dy)

    whole = {"tensor": B}
    laid = auto_layout(
        step,
        weights,
        x,
        dy,
        mesh=definition.mesh({"tensor": TENSOR}),
        fixed={"x": whole, "dy": whole, "result.0": whole, "result.2": whole},
        tied={"result.1": "weights"},
        capacity=once(weights, TENSOR) + x.nbytes + dy.nbytes,
        hardware=RATES,
    )
    for name in ("mlp.in.weight", "mlp.down.weight"):
        assert laid.layouts[f"weights.{name}"]["tensor"] == MATRICES[name]
        assert laid.layouts[f"result.1.{name}"]["tensor"] == MATRICES[name]
    activations = BLOCK.seq * BLOCK.width * 4
    assert laid.received == 2 * 2 * activations * (TENSOR - 1) // TENSOR
    assert laid.unknown == [] and laid.solution.exact
    agrees(laid, weights, x, dy)


# Whole models


def test_a_whole_model_with_its_gradients() -> None:
    """Whatever the solver has found in a few seconds is right."""
    model = dataclasses.replace(GPT, layers=1, width=16, vocab=31)
    rng = np.random.default_rng(2)
    weights = {n: jnp.asarray(rng.normal(0, 0.1, p.shape), jnp.float32) for n, p in parameters(model).items()}
    tokens, targets = (jnp.asarray(rng.integers(0, model.vocab, (4, model.seq)), jnp.int32) for _ in range(2))

    def step(weights: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        return jax.value_and_grad(lambda w: plain.loss(model, w, tokens, targets))(weights)

    capacity = 0.75 * sum(w.nbytes for w in weights.values()) + tokens.nbytes * 2
    mesh, tied = definition.mesh({"tensor": 2}), {"result.1": "weights"}
    laid = auto_layout(step, weights, tokens, targets, mesh=mesh, tied=tied, capacity=capacity, limit=5)
    assert laid.argument_bytes <= capacity
    for name in weights:
        assert laid.layouts[f"result.1.{name}"] == laid.layouts[f"weights.{name}"]
    agrees(laid, weights, tokens, targets)


def test_a_scan_keeps_its_sum_partial_until_its_end() -> None:
    """Gradients accumulated over a loop are reduced once, after it."""

    def accumulated(w: jax.Array, xs: jax.Array) -> jax.Array:
        def turn(total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return total + x.T @ jnp.tanh(x @ w), jnp.max(x)

        return lax.scan(turn, jnp.zeros_like(w), xs)

    rng = np.random.default_rng(3)
    w, xs = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 8), (5, 64, 8)))
    fixed = {"w": {"data": B}, "xs": {"data": S(1)}, "result.0": {"data": B}}
    laid = auto_layout(accumulated, w, xs, mesh=definition.mesh({"data": 2}), fixed=fixed, hardware=RATES)
    assert [(box.kinds, box.value.times) for box in laid.boxes] == [(("all-reduce",), 1)]
    agrees(laid, w, xs)


# Against brute force


def random_graph(seed: int) -> tuple[Callable[..., jax.Array], list[jax.Array]]:
    """A function of two or three arrays, of three operations."""
    rng = np.random.default_rng(seed)
    arrays = [jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) for _ in range(rng.integers(2, 4))]
    two: list[Callable[..., jax.Array]] = [lax.add, lax.mul, lax.dot, lax.dot]
    one: list[Callable[..., jax.Array]] = [lax.tanh, jnp.transpose, lambda x: x * 2.0]
    picks = [(rng.random() < 0.7, rng.integers(4), rng.integers(3), rng.random(2)) for _ in range(3)]
    operations = [(two[i] if both else one[j], which) for both, i, j, which in picks]

    def run(*given: jax.Array) -> jax.Array:
        values = list(given)
        for operation, which in operations:
            picked = [values[-1], values[int(which[0] * len(values))]]
            values.append(operation(picked[0]) if operation in one else operation(*picked))
        return values[-1]

    return run, arrays


@pytest.mark.parametrize("seed", range(10))
def test_the_optimum_is_that_of_brute_force(seed: int) -> None:
    run, arrays = random_graph(seed)
    program, _ = trace(run, arrays, [str(i) for i in range(len(arrays))])
    problem = Problem(program=program, sizes={"a": 2}, rates=Rates(flops=1e8, memory=1e9, link=1e8, delay=1e-8))
    capacity = sum(a.nbytes for a in arrays) * 0.7
    limited = Problem(program=program, sizes=problem.sizes, rates=problem.rates, capacity=capacity)
    for one in (problem, limited):
        assert solve(one).seconds == pytest.approx(brute_force(one), rel=1e-5)


def brute_force(problem: Problem) -> float:
    """The least over every way to choose: a value is boxed to each signature in which it is wanted, or made whole once,
    of which everything else is a part."""
    nodes = problem.program.nodes()
    choices = {node: problem.choices(node, problem.sizes) for node in nodes}
    prices = {id(c): problem.seconds(node, c) for node, each in choices.items() for c in each}
    held = {id(c): problem.held(n.outputs[0], c.outputs[0]) for n in problem.program.arguments for c in choices[n]}
    numbers: dict[Signature, int] = {Signature(): 0}
    for each in choices.values():
        for choice in each:
            for signature in (*choice.inputs, *choice.outputs):
                numbers.setdefault(signature, len(numbers))
    ends = {id(c): [[numbers[s] for s in part] for part in (c.inputs, c.outputs)] for e in choices.values() for c in e}
    values = [value for node in nodes for value in node.outputs]
    change = {v: [[_change(problem, v, s, t) for t in numbers] for s in numbers] for v in values}
    best = math.inf
    for taken in itertools.product(*choices.values()):
        total = sum(prices[id(c)] for c in taken)
        if total < best and sum(held.get(id(c), 0) for c in taken) <= problem.capacity:
            made: dict[Value, int] = {}
            wanted: dict[Value, set[int]] = {}
            for node, choice in zip(nodes, taken, strict=True):
                inputs, outputs = ends[id(choice)]
                made.update(zip(node.outputs, outputs, strict=True))
                for atom, number in zip(node.inputs, inputs, strict=True):
                    if isinstance(atom, Value):
                        wanted.setdefault(atom, set()).add(number)
            for value, targets in wanted.items():
                row = change[value][made[value]]
                total += min(sum(row[t] for t in targets), row[0])
            best = min(best, total)
    return best


def _change(problem: Problem, value: Value, source: Signature, target: Signature) -> float:
    dims = max((p.dim for s in (source, target) for p in s.values() if isinstance(p, S)), default=-1)
    return problem.box_seconds(problem.box(value, source, target)) if dims < len(value.shape) else math.inf


# What may go wrong


def test_what_has_no_rule_is_whole_and_said() -> None:
    def search(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda s: jnp.sum(s) < 99.0, lambda s: s * 2, x) + 1.0

    x = jnp.ones((8, 4))
    laid = auto_layout(search, x, mesh=definition.mesh({"a": 2}))
    assert laid.unknown == ["while"] and "while" in str(laid)
    agrees(laid, x)


def test_constants_and_results_that_are_arguments() -> None:
    table = jnp.arange(64.0).reshape(8, 8)

    def f(x: jax.Array, n: int) -> Any:
        return {"y": x @ table, "x": x, "one": 1.0, "n": n}

    laid = auto_layout(f, jnp.ones((4, 8)), 3, mesh=definition.mesh({"a": 2}))
    agrees(laid, jnp.ones((4, 8)), 3)
    np.testing.assert_allclose(laid(jnp.ones((4, 8)), 4)["y"], jnp.ones((4, 8)) @ table)


def test_two_axes_split_one_dimension_in_order() -> None:
    laid = auto_layout(
        lambda x: jnp.sum(x, 0),
        jnp.arange(32.0).reshape(16, 2),
        mesh=definition.mesh({"a": 2, "b": 2}),
        fixed={"x": {"a": S(0), "b": S(0)}, "result": {"a": B, "b": S(0)}},
    )
    agrees(laid, jnp.arange(32.0).reshape(16, 2))


def simple(x: jax.Array) -> jax.Array:
    return x * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fixed": {"y": {"a": B}}}, "'y': nothing has that name; there are x, result"),
        ({"fixed": {"x": {"c": B}}}, "axis 'c' is not in the mesh"),
        ({"fixed": {"x": {"a": S(1)}}}, "leaves no layout for x"),
        ({"capacity": 4.0}, "no layout satisfies what is given in 4 bytes of arguments a device"),
        ({"tied": {"result": "y"}}, "tied 'result': y is no argument"),
        ({"tied": {"result.1": "x"}}, "tied 'result.1': no result has that name"),
    ],
)
def test_bad_input(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match="auto_layout") as caught:
        auto_layout(simple, jnp.ones((4, 3)), mesh=definition.mesh({"a": 2}), **options)
    assert said in str(caught.value)


def test_a_function_that_says_layouts_is_refused() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.shard_map(lambda x: x, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())(x)

    mesh = definition.mesh({"a": 2})
    with pytest.raises(UserError, match="shard_map in the function says a layout of its own"):
        auto_layout(f, jnp.ones(4), mesh=mesh)
