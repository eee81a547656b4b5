"""Keys and values of the tokens that were, and attention to them.

All rows of a batch write at the same slot of their caches, so that a step writes one slice; a row whose text is shorter
begins at a later slot, and what lies before is masked. Letters: B batch, C tokens at once, L slots, N query heads, M
key-value heads, G query heads of each, K head width.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from jaxgpt.model.attention import KEYS, QUERIES
from jaxgpt.sharding.named import local

CACHE = "batch kv_heads length head"
"""Heads outside of slots: each head's keys lie together, and are multiplied where they lie."""


@dataclass
class CachedAttention:
    """Attention of one layer to its cache and to the new tokens: what a block calls in the place of a kernel."""

    keys: jax.Array
    """[B, M, L, K], and values too."""
    values: jax.Array
    slot: jax.Array
    """Slot of the first of the new tokens."""
    starts: jax.Array
    """First slot of each row, [B]."""
    window: int | None
    written: tuple[jax.Array, jax.Array] | None = field(default=None, init=False)
    """The caches with the new tokens in them, once it was called."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Output [B, C, N, K] of queries [B, C, N, K] and their own keys and values [B, C, M, K]."""
        run = local(self._attend, (QUERIES, KEYS, KEYS, CACHE, CACHE, "", "batch"), (QUERIES, CACHE, CACHE))
        out, *written = run(q, k, v, self.keys, self.values, self.slot, self.starts)
        self.written = (written[0], written[1])
        return out

    def _attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        slot: jax.Array,
        starts: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        batch, count, heads, head = q.shape
        kv, slots = keys.shape[1], keys.shape[2]
        place = (0, 0, slot, 0)
        keys = lax.dynamic_update_slice(keys, jnp.swapaxes(k, 1, 2).astype(keys.dtype), place)
        values = lax.dynamic_update_slice(values, jnp.swapaxes(v, 1, 2).astype(values.dtype), place)
        grouped = jnp.moveaxis((q * head**-0.5).reshape(batch, count, kv, heads // kv, head), 1, 3)
        rows = grouped.reshape(batch, kv, -1, head)  # [B, M, G * C, K]
        scores = jnp.einsum("bmrk,bmlk->bmrl", rows, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(self._seen(slot, starts, count, slots), scores.reshape(*grouped.shape[:-1], slots), -1e30)
        shares = jax.nn.softmax(scores, -1).astype(values.dtype).reshape(*rows.shape[:-1], slots)
        out = jnp.einsum("bmrl,bmlk->bmrk", shares, values).reshape(grouped.shape)
        return jnp.moveaxis(out, 3, 1).reshape(q.shape), keys, values

    def _seen(self, slot: jax.Array, starts: jax.Array, count: int, slots: int) -> jax.Array:
        """Which slots each new token sees, [B, 1, 1, C, L]."""
        here, there = slot + jnp.arange(count)[:, None], jnp.arange(slots)
        seen = there <= here
        if self.window is not None:
            seen = seen & (here - there < self.window)
        return (seen & (there >= starts[:, None, None]))[:, None, None]
