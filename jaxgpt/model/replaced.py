"""Functions of a user's own in the place of the model's, written for one device and whole arrays.

A mesh asks for nothing more of them: attention is given the heads that a device has, and the whole sequence, gathered
where that lies split; what acts on the feed-forward layer is given its part of the width. Between forward and backward
their inputs alone are kept. Letters: B batch, S sequence, D width, N query heads, M key-value heads, K head width, F
feed-forward width.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxgpt.errors import require
from jaxgpt.sharding.named import local, nested, sequence_axis
from jaxgpt.sharding.ring import order

QUERIES = "batch length heads head"
KEYS = "batch length kv_heads head"
WIDE = "batch length mlp"
Product = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Replaced:
    """What stands in the place of what; None: the model's own. A loop inside of one begins with values made from its
    arguments, such as 0 * q, since JAX types values by the axes over which they differ."""

    attention: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None
    """(q [B, S, N, K], k and v [B, S, M, K]) -> [B, S, N, K]; causal masks are its own. Query head n belongs to
    key-value head n // (N // M); positions are rotated into q and k already, where the model has rotary ones."""
    activation: Callable[[jax.Array], jax.Array] | None = None
    """[B, S, F] -> the same; of a gated layer that of the gate."""
    mlp: Callable[[jax.Array, Product, Product], jax.Array] | None = None
    """(x [B, S, D], up, down) -> [B, S, D]: the feed-forward layer, of the block's own two products up: [B, S, D] ->
    [B, S, F] (gated: [B, S, 2, F], gate first) and down: [B, S, F] -> [B, S, D], and of what acts on each number."""
    norm: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array] | None = None
    """(x [B, S, D], scale [D], bias [D] or None) -> [B, S, D], of each token by itself."""


NOTHING = Replaced()
_active: ContextVar[Replaced] = ContextVar("replaced", default=NOTHING)


@contextlib.contextmanager
def replaced(functions: Replaced) -> Iterator[None]:
    """What is traced within it takes these functions."""
    token = _active.set(functions)
    try:
        yield
    finally:
        _active.reset(token)


def active() -> Replaced:
    """The functions to be taken."""
    return _active.get()


def alike(function: Callable[..., jax.Array], y: jax.Array, x: jax.Array) -> jax.Array:
    """What a user's function made of x, in x's type. Raises UserError where it is of another shape."""
    require(y.shape == x.shape, _named(function), y.shape, f"must return the shape {x.shape}")
    return y.astype(x.dtype)


def attention(function: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """A user's attention on every device's own heads."""
    return _on_parts(function, (QUERIES, KEYS, KEYS), QUERIES, q, k, v)


def activation(function: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """A user's activation on every device's own part of the width."""
    return _on_parts(function, (WIDE,), WIDE, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _on_parts(function: Callable[..., jax.Array], inputs: tuple[str, ...], out: str, *x: jax.Array) -> jax.Array:
    """function in each device's own terms. Forward and backward are a map of their own each, and the backward runs the
    function again."""

    def checked(*x: jax.Array) -> jax.Array:
        return alike(function, function(*x), x[0])

    return _mapped(checked, inputs, out)(*x)


def _forward(function: Any, inputs: tuple[str, ...], out: str, *x: jax.Array) -> tuple[jax.Array, Any]:
    return _on_parts(function, inputs, out, *x), x


def _backward(function: Any, inputs: tuple[str, ...], out: str, kept: Any, dy: jax.Array) -> Any:
    def derived(dy: jax.Array, *x: jax.Array) -> Any:
        y, derivative = jax.vjp(function, *x)
        return derivative(dy.astype(y.dtype))

    return _mapped(derived, (out, *inputs), inputs)(dy, *kept)


_on_parts.defvjp(_forward, _backward)


def _mapped(function: Callable[..., Any], inputs: tuple[str, ...], outputs: Any) -> Callable[..., Any]:
    if sequence_axis() is None:
        return local(function, inputs, outputs)
    return nested(_of_whole_sequences(function), inputs, outputs)


def _of_whole_sequences(function: Callable[..., Any]) -> Callable[..., Any]:
    """function on sequences put together from their parts, in the order of the text; of what it gives, a device takes
    its own part."""

    def run(*parts: jax.Array) -> Any:
        found = sequence_axis()
        assert found is not None
        size = parts[0].shape[1]
        split = order(size * found.parts, found.parts)
        text = np.argsort(split)
        whole = function(*(lax.all_gather(x, found.axis, axis=1, tiled=True)[:, text] for x in parts))
        first = lax.axis_index(found.axis) * size
        return jax.tree.map(lambda y: lax.dynamic_slice_in_dim(y[:, split], first, size, 1), whole)

    return run


def _named(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
