"""A backward in two parts: together they are the whole, and no product is computed twice."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params
from tiny import LLAMA, run_config

from jaxgpt.pipeline.split import Backward, Split, split
from jaxgpt.sharding.jaxprs import live
from jaxgpt.training import parity

pytestmark = pytest.mark.core

Layer = Callable[[dict[str, jax.Array], jax.Array], jax.Array]


def dots(function: Callable[..., Any], *arguments: Any) -> int:
    """Matrix products that the function runs, those inside of calls and loops included."""

    return dots_of(live(jax.make_jaxpr(function)(*arguments)))


def dots_of(jaxpr: Jaxpr) -> int:
    own = sum(equation.primitive.name == "dot_general" for equation in jaxpr.eqns)
    return own + sum(dots_of(inner) for e in jaxpr.eqns for inner in jaxprs_in_params(e.params))


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def two_layers(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ weights["up"] + weights["bias"])
    return x + hidden @ weights["down"]


WEIGHTS = {"up": drawn(6, 10), "bias": drawn(10, seed=1), "down": drawn(10, 6, seed=2)}
X, DY = drawn(4, 6, seed=3), drawn(4, 6, seed=4)


def backward_of(layer: Layer) -> Backward:
    def backward(arguments: Any, dy: jax.Array) -> tuple[Any, jax.Array]:
        weights, x = arguments
        return jax.vjp(layer, weights, x)[1](dy)

    return backward


def both(parts: Split, arguments: Any, dy: jax.Array) -> tuple[Any, jax.Array]:
    dx, between = parts.to_input(arguments, dy)
    return parts.to_weights(arguments, between), dx


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.checkpoint(jax.jit(f))])
def test_the_parts_are_the_whole_and_repeat_nothing(wrap: Callable[[Layer], Layer]) -> None:
    backward, arguments = backward_of(wrap(two_layers)), (WEIGHTS, X)
    parts = split(backward, arguments, DY)
    (expected, dx), (found, dx_found) = backward(arguments, DY), both(parts, arguments, DY)
    np.testing.assert_allclose(dx_found, dx, rtol=1e-5)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    _, between = parts.to_input(arguments, DY)
    first, second = dots(parts.to_input, arguments, DY), dots(parts.to_weights, arguments, between)
    # two towards the input, behind what is computed for them again; two towards the weights
    assert second == 2
    assert first + second == dots(backward, arguments, DY)


def test_the_first_part_computes_nothing_for_the_weights() -> None:
    """What it hands on is no gradient of a weight but what such a gradient is made from."""
    parts = split(backward_of(two_layers), (WEIGHTS, X), DY)
    _, between = parts.to_input((WEIGHTS, X), DY)
    assert not {b.shape for b in between} & {w.shape for w in WEIGHTS.values()}
    assert sum(math.prod(b.shape) for b in between) <= 4 * (10 + 10 + 6 + 6)


def test_values_are_not_looked_at() -> None:
    """Parts made from other values serve any."""
    backward = backward_of(two_layers)
    zeros = jax.tree.map(jnp.zeros_like, ((WEIGHTS, X), DY))
    found = both(split(backward, *zeros), (WEIGHTS, X), DY)
    jax.tree.map(np.testing.assert_array_equal, found, backward((WEIGHTS, X), DY))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_split_backward_of_a_model_has_the_products_of_a_whole_one(recompute: str) -> None:
    counts = {}
    for schedule in ("1f1b", "zero-bubble"):
        config = run_config(LLAMA, schedule=schedule, recompute=recompute)
        program = parity.program(config, "pipe=2")
        step = jax.ShapeDtypeStruct((), np.int32)
        traced = program.gradients.trace(program.targets()["params"], program.batch_targets(), step).jaxpr
        counts[schedule] = dots_of(live(traced))
    # a block's four with weights and attention's two, forward, and twice as many back; the head's three
    assert counts["1f1b"] == counts["zero-bubble"] >= 3 * (4 + 2) + 3


def test_a_weight_whose_gradient_is_what_arrives_and_one_that_is_not_used() -> None:
    def layer(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sin(x) + weights["added"]

    arguments = ({"added": X, "unused": DY}, X)
    parts = split(backward_of(layer), arguments, DY)
    found, dx = both(parts, arguments, DY)
    np.testing.assert_array_equal(found["added"], DY)
    assert not np.asarray(found["unused"]).any()
    np.testing.assert_allclose(dx, jnp.cos(X) * DY, rtol=1e-6)
