"""Attention: a kernel on each device's own heads, with what it keeps for its backward handed out.

A fused kernel inside a nested shard_map cannot be differentiated plainly, so forward and backward are each a nested
shard_map of their own; and what lies between them is handed out, so that a pipeline can keep it.
Letters: B batch, S queries and keys, N query heads, M key-value heads, K head width.
"""

import functools

import jax
from jaxtyping import Array, Float

from jaxgpt.sharding.named import local

QUERIES = "batch length heads head"
KEYS = "batch length kv_heads head"

KEEPS = {"cudnn": True, "xla": False}
"""Whether the backward takes what the forward computed inside (log-sum-exp and output), or computes scores again:
a fused kernel has no other way, and on CPU holding the scores costs more time than they take to compute."""


def kernel_for(platform: str, dtype: str) -> str:
    """cudnn on GPUs in 16-bit types, which it needs; xla elsewhere."""
    return "cudnn" if platform in ("gpu", "cuda") and dtype == "bf16" else "xla"


def _core(q: jax.Array, k: jax.Array, v: jax.Array, kernel: str, window: int | None) -> jax.Array:
    reach = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=reach, implementation="cudnn" if kernel == "cudnn" else "xla"
    )


def _inside(q: jax.Array, k: jax.Array, v: jax.Array, kernel: str, window: int | None) -> list[jax.Array]:
    return list(jax.vjp(lambda *x: _core(*x, kernel, window), q, k, v)[1].opaque_residuals)


def _handed_out(q: jax.Array, k: jax.Array, v: jax.Array, kernel: str, window: int | None) -> list[str | None]:
    """The named dimensions of each array that the kernel keeps; None for constants, which the backward makes again.

    The dimension of heads is the one that doubles when the heads do.
    """

    def shapes(times: int) -> list[tuple[int, ...]]:
        double = [jax.ShapeDtypeStruct((*x.shape[:2], x.shape[2] * times, x.shape[3]), x.dtype) for x in (q, k, v)]
        return [r.shape for r in jax.eval_shape(lambda *x: _inside(*x, kernel, window), *double)]

    def names(one: tuple[int, ...], two: tuple[int, ...]) -> str | None:
        dims = ["heads" if a != b else "head" for a, b in zip(one, two, strict=True)]
        return " ".join(dims) if "heads" in dims else None

    if not KEEPS[kernel]:
        return []
    return [names(one, two) for one, two in zip(shapes(1), shapes(2), strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def attention(
    q: Float[Array, "B S N K"], k: Float[Array, "B S M K"], v: Float[Array, "B S M K"], kernel: str, window: int | None
) -> Float[Array, "B S N K"]:
    """softmax(q k^T / sqrt(K)) v over what each position may see: itself and all before it, or window - 1 of them.

    Query heads share key-value heads in consecutive groups of N / M (arXiv 2305.13245).
    """
    return local(lambda *x: _core(*x, kernel, window), (QUERIES, KEYS, KEYS), QUERIES)(q, k, v)


Kept = tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, kernel: str, window: int | None) -> tuple[jax.Array, Kept]:
    dims = _handed_out(q, k, v, kernel, window)

    def core(*x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        if not dims:
            return _core(*x, kernel, window), []
        out, vjp = jax.vjp(lambda *x: _core(*x, kernel, window), *x)
        return out, [r for r, names in zip(vjp.opaque_residuals, dims, strict=True) if names]

    kept_dims = [names for names in dims if names]
    out, kept = local(core, (QUERIES, KEYS, KEYS), (QUERIES, kept_dims))(q, k, v)
    return out, (q, k, v, kept)


def _backward(kernel: str, window: int | None, kept: Kept, dout: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, inside = kept
    dims = _handed_out(q, k, v, kernel, window)

    def core(q: jax.Array, k: jax.Array, v: jax.Array, inside: list[jax.Array], dout: jax.Array) -> tuple[Array, ...]:
        _, vjp = jax.vjp(lambda *x: _core(*x, kernel, window), q, k, v)
        if dims:
            handed = iter(inside)
            own = vjp.opaque_residuals
            vjp.opaque_residuals = [next(handed) if names else r for r, names in zip(own, dims, strict=True)]
        return tuple(vjp(dout))

    kept_dims = [names for names in dims if names]
    return local(core, (QUERIES, KEYS, KEYS, kept_dims, QUERIES), (QUERIES, KEYS, KEYS))(q, k, v, inside, dout)


attention.defvjp(_forward, _backward)
