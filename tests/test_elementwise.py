"""Derivatives written by hand against those that JAX derives; dropout's masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.model import elementwise
from jaxgpt.model.elementwise import activation, dropout, dropout_key, gated, norm, rotary

X = jax.random.normal(jax.random.key(0), (2, 3, 4, 8))


def plain_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, kind: str) -> jax.Array:
    centre = x.mean(-1, keepdims=True) if kind == "layernorm" else 0.0
    spread = jnp.sqrt(((x - centre) ** 2).mean(-1, keepdims=True) + 1e-5)
    return (x - centre) / spread * scale + bias


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm(kind: str) -> None:
    scale, bias = jnp.linspace(0.5, 2, 8), jnp.linspace(-1, 1, 8)
    weigh = jax.random.normal(jax.random.key(1), X.shape)
    ours, theirs = (
        jax.value_and_grad(lambda *a, f=f: jnp.sum(weigh * f(*a)), (0, 1, 2))(X, scale, bias)
        for f in (lambda x, s, b: norm(x, s, b, kind, 1e-5), lambda x, s, b: plain_norm(x, s, b, kind))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


@pytest.mark.parametrize(
    ("kind", "plainly"),
    [
        ("gelu", lambda x: jax.nn.gelu(x, approximate=False)),
        ("gelu_tanh", lambda x: jax.nn.gelu(x, approximate=True)),
        ("silu", jax.nn.silu),
        ("relu", jax.nn.relu),
    ],
)
def test_activations(kind: str, plainly: object) -> None:
    ours, theirs = (
        jax.value_and_grad(lambda x, f=f: jnp.sum(jnp.cos(X) * f(x)))(3 * X)
        for f in (lambda x: activation(x, kind), plainly)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)
    both = jnp.stack([X, X[::-1]], -2)
    found, derivative = jax.vjp(lambda x: gated(x, kind), both)
    wanted, plain_derivative = jax.vjp(lambda x: plainly(x[..., 0, :]) * x[..., 1, :], both)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(derivative(X)[0], plain_derivative(X)[0], rtol=1e-5, atol=1e-6)


def test_rotary_keeps_lengths_and_its_gradient_turns_back() -> None:
    angles = jnp.arange(3.0)[:, None] * jnp.array([1.0, 0.1, 0.01])
    turned, derivative = jax.vjp(lambda x: rotary(x, jnp.cos(angles), jnp.sin(angles)), X)
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(X, axis=-1), rtol=1e-6)
    np.testing.assert_array_equal(turned[..., 6:], X[..., 6:])
    np.testing.assert_allclose(derivative(turned)[0], X, rtol=1e-5, atol=1e-6)


def mask(
    step: int = 0, site: int = 0, samples: object = (0, 1), positions: object = (0, 1, 2), seed: int = 0
) -> np.ndarray:
    numbers = jnp.asarray(samples, jnp.int32), jnp.asarray(positions, jnp.int32)
    ones = jnp.ones((len(numbers[0]), len(numbers[1]), 512))
    return np.asarray(dropout(ones, 0.25, dropout_key(seed, jnp.int32(step)), jnp.int32(site), *numbers))


def test_masks_are_functions_of_step_site_sample_and_position() -> None:
    whole = mask(samples=range(4), positions=range(6))
    np.testing.assert_array_equal(mask(samples=[2, 3], positions=[1, 5]), whole[2:][:, [1, 5]])
    np.testing.assert_array_equal(np.unique(whole), np.float32([0, 4 / 3]))
    assert abs((whole == 0).mean() - 0.25) < 0.02


@pytest.mark.parametrize(
    "other", [{"step": 1}, {"site": 1}, {"samples": [2, 3]}, {"positions": [3, 4, 5]}, {"seed": 1}]
)
def test_masks_differ_between_steps_layers_samples_positions_and_seeds(other: dict[str, object]) -> None:
    same = ((mask() == 0) == (mask(**other) == 0)).mean()
    assert abs(same - (0.75**2 + 0.25**2)) < 0.05  # what two independent draws share


def test_the_backward_draws_the_forwards_mask() -> None:
    numbers = jnp.arange(2, dtype=jnp.int32), jnp.arange(3, dtype=jnp.int32)
    draw = (dropout_key(0, jnp.int32(3)), jnp.int32(1), *numbers)
    x = jnp.ones((2, 3, 64))
    y, derivative = jax.vjp(lambda x: dropout(x, 0.5, *draw), x)
    np.testing.assert_array_equal(derivative(x)[0], y)
    assert not jax.tree.leaves(derivative.opaque_residuals) or max(r.size for r in derivative.opaque_residuals) < x.size


def test_an_unknown_activation_is_a_bug() -> None:
    with pytest.raises(ValueError, match="no activation"):
        elementwise._activate(X, "swish")
