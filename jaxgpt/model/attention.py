"""Attention: a kernel on each device's own heads, with what it keeps for its backward handed out.

A fused kernel inside a nested shard_map cannot be differentiated plainly, so forward and backward are each a nested
shard_map of their own; and what lies between them is handed out, so that a pipeline can keep it.
Letters: B batch, S queries and keys, N query heads, M key-value heads, K head width.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxgpt.model import blocked
from jaxgpt.model.blocked import Starts
from jaxgpt.sharding import ring
from jaxgpt.sharding.named import has_layout, local, nested, sequence_axis

QUERIES = "batch length heads head"
KEYS = "batch length kv_heads head"

SUMS = "batch length heads"
STARTS = "batch length"

KERNELS = ("cudnn", "xla", "blocked")
"""cudnn: the fused GPU kernel of jax.nn.dot_product_attention. xla: the same function in plain operations. blocked:
jaxgpt.model.blocked, for CPUs. All keep the same for their backward: the output and each query's log-sum-exp."""


UNSEEN = -(2.0**41)
"""What is added to the score of a key that is not seen: as jax.nn has it for cuDNN, which the difference of two larger
ones puts wrong."""


def kernel_for(platform: str, dtype: str, masked: int | None = None) -> str:
    """cudnn on NVIDIA's GPUs in 16-bit types, which it needs; blocked on CPUs; xla elsewhere.

    masked: tokens that a kernel is given at once, where documents are apart. cuDNN has no segments, but takes what is
    added to the scores; of an even number of tokens alone.
    """
    if platform in ("gpu", "cuda") and dtype == "bf16" and not (masked or 0) % 2:
        return "cudnn"
    return "blocked" if platform == "cpu" else "xla"


@dataclass(frozen=True)
class Part:
    """Attention of a device's own heads to some keys. causal: query i sees key i and those before it, at most window
    of them; else every query sees every key. starts: where documents are apart, the place at which the document of each
    query begins and that of each key, [B, S] and [B, U]: a query sees its own document's, which may be none of these
    keys."""

    kernel: str
    causal: bool = True
    window: int | None = None

    @property
    def in_order(self) -> bool:
        """Whether messages are to have an order, as on CPUs (sharding.collectives.after)."""
        return self.kernel == "blocked"

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, *starts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Output [B, S, N, K], and fp32 log-sum-exp of each query's scores [B, S, N]."""
        if self.kernel == "blocked":
            return blocked.forward(q, k, v, self.causal, self.window, starts)
        if self.kernel == "xla":
            return jax.nn.dot_product_attention(q, k, v, return_residual=True, **self._options(q, starts))
        out, derivative = self._derived(q, k, v, starts)
        sums = next(r for r in derivative.opaque_residuals if _is_sums(r, q))
        return out, jnp.swapaxes(sums, 1, 2)

    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        out: jax.Array,
        sums: jax.Array,
        dout: jax.Array,
        *starts: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gradients towards q, k and v. out, sums: over all keys that the queries see, of which these may be a part."""
        if self.kernel != "cudnn":
            return blocked.backward(q, k, v, out, sums, dout, self.causal, self.window, starts)
        own_out, derivative = self._derived(q, k, v, starts)  # for its structure alone: what it computes is replaced
        own = derivative.opaque_residuals
        if not any(r is own_out for r in own):
            raise RuntimeError("the fused kernel does not keep its output as this version of JAX's did")
        by_head = jnp.swapaxes(sums, 1, 2)
        derivative.opaque_residuals = [out if r is own_out else by_head if _is_sums(r, q) else r for r in own]
        dq, dk, dv = derivative(dout)
        return dq, dk, dv

    def _derived(self, q: jax.Array, k: jax.Array, v: jax.Array, starts: Starts) -> tuple[jax.Array, Any]:
        options = self._options(q, starts)
        return jax.vjp(lambda *x: jax.nn.dot_product_attention(*x, **options), q, k, v)

    def _options(self, q: jax.Array, starts: Starts) -> dict[str, Any]:
        reach = None if self.window is None else (self.window - 1, 0)
        implementation = "cudnn" if self.kernel == "cudnn" else "xla"
        options = {"is_causal": self.causal, "local_window_size": reach, "implementation": implementation}
        return options | {"bias": self._added(q, *starts), "local_window_size": None} if starts else options

    def _added(self, q: jax.Array, own: jax.Array, theirs: jax.Array) -> jax.Array:
        """What is added to the scores, [B, 1, S, U]: the window is in it, too."""
        seen = own[..., None] == theirs[:, None]
        if self.window is not None:
            seen &= jnp.arange(own.shape[1])[:, None] - jnp.arange(theirs.shape[1]) < self.window
        return jnp.where(seen, 0.0, UNSEEN).astype(q.dtype)[:, None]


def _is_sums(x: jax.Array, q: jax.Array) -> bool:
    """Whether this is what the fused kernel keeps of each query's scores, [B, N, S]."""
    return x.shape == (q.shape[0], q.shape[2], q.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def attention(
    q: Float[Array, "B S N K"],
    k: Float[Array, "B S M K"],
    v: Float[Array, "B S M K"],
    kernel: str,
    window: int | None,
    starts: Int[Array, "B S"] | None = None,
) -> Float[Array, "B S N K"]:
    """softmax(q k^T / sqrt(K)) v over what each position may see: itself and all before it, or window - 1 of them; of
    its own document alone, where starts says where each token's begins.

    Query heads share key-value heads in consecutive groups of N / M (arXiv 2305.13245). Where the sequence lies split,
    the parts of it pass round a ring.
    """
    return _forward(q, k, v, kernel, window, starts)[0]


Kept = tuple[jax.Array | None, ...]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, kernel: str, window: int | None, starts: jax.Array | None
) -> tuple[jax.Array, Kept]:
    run: Any = Part(kernel, window=window).forward
    if sequence_axis():
        run = functools.partial(ring.forward, Part(kernel), Part(kernel, causal=False))
    both = () if starts is None else (starts, starts)
    dims = (QUERIES, KEYS, KEYS, *(STARTS for _ in both))
    out, sums = _wrapper(kernel)(run, dims, (QUERIES, SUMS))(q, k, v, *both)
    # named here, so that the result and what the backward is handed are one value, which nothing keeps twice
    out, sums = checkpoint_name(out, "attended"), checkpoint_name(sums, "attention_sums")
    return out, (q, k, v, out, sums, starts)


def _wrapper(kernel: str) -> Any:
    """cuDNN's kernel and a ring need every mesh axis manual, one of a single device as well."""
    return nested if sequence_axis() or (kernel == "cudnn" and has_layout()) else local


def _backward(kernel: str, window: int | None, kept: Kept, dout: jax.Array) -> tuple[jax.Array | None, ...]:
    *arrays, starts = kept
    run: Any = Part(kernel, window=window).backward
    if sequence_axis():
        run = functools.partial(ring.backward, Part(kernel), Part(kernel, causal=False))
    both = () if starts is None else (starts, starts)
    dims = (QUERIES, KEYS, KEYS, QUERIES, SUMS, QUERIES, *(STARTS for _ in both))
    return *_wrapper(kernel)(run, dims, (QUERIES, KEYS, KEYS))(*arrays, dout, *both), None


attention.defvjp(_forward, _backward)
