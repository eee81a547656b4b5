"""Context parallelism: the sequence split over a mesh axis, causal work in balance, attention round a ring.

The sequence is cut into 2n chunks for n devices; device i holds chunks i and 2n-1-i, one early and one late, so that
every device has the same number of (query, key) pairs (the "zigzag" order). Keys and values pass from device to device
(ring attention, arXiv 2310.01889) or are gathered, and the parts of the softmax are merged by their log-sum-exp. Of
another device's keys, those of an earlier device: all queries see its first chunk and none its second; of a later one:
only the second chunk of queries sees them, and both chunks whole. So a step is one unmasked product of half the size
either way. Where documents are apart, the places at which the keys' documents begin travel with the keys.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxgpt.sharding.named import sequence_axis


@runtime_checkable
class Kernel(Protocol):
    """Attention to some keys (model.attention.Part)."""

    @property
    def in_order(self) -> bool:
        """Whether a ring's turns are to be written out: a loop's messages would have no order with others beside it
        (sharding.collectives.after)."""

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, *starts: jax.Array) -> tuple[jax.Array, jax.Array]: ...

    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        out: jax.Array,
        sums: jax.Array,
        dout: jax.Array,
        *starts: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


def order(seq: int, parts: int) -> Int[np.ndarray, " seq"]:
    """The position in the text of each place in the split sequence, device after device."""
    chunks = np.arange(seq).reshape(2 * parts, -1)
    return np.concatenate([chunks[[i, 2 * parts - 1 - i]].ravel() for i in range(parts)])


def positions(length: int) -> Int[Array, " length"]:
    """Position in the whole sequence of each of this device's `length` tokens."""
    found = sequence_axis()
    if found is None:
        return jnp.arange(length)
    axis, parts, _ = found
    mine, chunk = lax.axis_index(axis), jnp.arange(length // 2)
    return jnp.concatenate([mine * (length // 2) + chunk, (2 * parts - 1 - mine) * (length // 2) + chunk])


class _Others:
    """The keys and values of the other devices, one device's at a turn: passed round a ring, so that each holds two
    parts at a time; or gathered at once, so that each holds all and waits but once."""

    def __init__(self) -> None:
        found = sequence_axis()
        assert found is not None
        self.axis, self.parts, self.form = found
        self.mine = lax.axis_index(self.axis)

    def _next(self, x: jax.Array) -> jax.Array:
        return lax.ppermute(x, self.axis, [(i, (i + 1) % self.parts) for i in range(self.parts)])

    def source(self, turn: jax.Array) -> jax.Array:
        """Whose part is seen at a turn."""
        return (self.mine - turn) % self.parts

    def start(self, *own: jax.Array) -> tuple[jax.Array, ...]:
        """What the loop carries, from this device's own."""
        return own if self.form == "ring" else tuple(lax.all_gather(x, self.axis) for x in own)

    def turn(self, carried: tuple[jax.Array, ...], turn: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
        """What is carried on, and the part seen at this turn."""
        if self.form == "ring":
            passed = tuple(self._next(x) for x in carried)
            return passed, passed
        return carried, tuple(lax.dynamic_index_in_dim(x, self.source(turn), keepdims=False) for x in carried)

    def start_sum(self, *own: jax.Array) -> tuple[jax.Array, ...]:
        """Gradients of the parts, carried, begun with this device's own."""
        if self.form == "ring":
            return own
        return tuple(jnp.zeros((self.parts, *x.shape), x.dtype).at[self.mine].set(x) for x in own)

    def add(self, carried: tuple[jax.Array, ...], part: Any, turn: jax.Array) -> tuple[jax.Array, ...]:
        """With the gradient of the part seen at this turn; round the ring it travels with its part."""
        if self.form == "ring":
            return tuple(self._next(x) + p for x, p in zip(carried, part, strict=True))
        return tuple(x.at[self.source(turn)].add(p) for x, p in zip(carried, part, strict=True))

    def home(self, carried: tuple[jax.Array, ...], dtype: Any) -> tuple[jax.Array, ...]:
        """The sum of what all devices have for this one's part."""
        if self.form == "ring":
            return tuple(self._next(x.astype(dtype)) for x in carried)
        return tuple(lax.psum_scatter(x, self.axis).astype(dtype) for x in carried)


def forward(
    causal: Kernel, full: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, *starts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of this device's queries over the whole sequence before them. starts: of its queries and
    of its keys, where documents are apart."""
    others, half, mine = _Others(), q.shape[1] // 2, starts[:1]
    out, sums = causal.forward(q, k, v, *starts)

    def earlier(*keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v, *theirs = (x[:, :half] for x in keys)
        return full.forward(q, k, v, *mine, *theirs)

    def later(*keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v, *theirs = keys
        part, part_sums = full.forward(q[:, half:], k, v, *(x[:, half:] for x in mine), *theirs)
        nothing = jnp.full_like(part_sums, -jnp.inf)
        return jnp.concatenate([jnp.zeros_like(part), part], 1), jnp.concatenate([nothing, part_sums], 1)

    def step(carry: Any, turn: jax.Array) -> tuple[Any, None]:
        out, sums, carried = carry
        carried, keys = others.turn(carried, turn)
        part, part_sums = lax.cond(others.source(turn) < others.mine, earlier, later, *keys)
        return (*_merged(out, sums, part, part_sums), carried), None

    start = (out.astype(jnp.float32), sums, others.start(k, v, *starts[1:]))
    out32, sums, _ = _turns(causal, step, start, others.parts)
    return out32.astype(q.dtype), sums


def _turns(kernel: Kernel, step: Any, start: Any, parts: int) -> Any:
    """What a step carries in the end, of a turn for each other part."""
    return lax.scan(step, start, jnp.arange(1, parts), unroll=parts - 1 if kernel.in_order else 1)[0]


def _merged(out: jax.Array, sums: jax.Array, part: jax.Array, part_sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two parts of a softmax as one."""
    whole = jnp.logaddexp(sums, part_sums)
    share, part_share = jnp.exp(sums - whole)[..., None], jnp.exp(part_sums - whole)[..., None]
    return out * share + part * part_share, whole


def backward(
    causal: Kernel,
    full: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    sums: jax.Array,
    dout: jax.Array,
    *starts: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients towards this device's own queries, keys and values."""
    others, half, mine = _Others(), q.shape[1] // 2, starts[:1]
    late = (q[:, half:], out[:, half:], sums[:, half:], dout[:, half:], *(x[:, half:] for x in mine))

    def earlier(*keys: jax.Array) -> tuple[jax.Array, ...]:
        k, v, *theirs = (x[:, :half] for x in keys)
        dq, dk, dv = full.backward(q, k, v, out, sums, dout, *mine, *theirs)
        return dq, *(jnp.concatenate([d, jnp.zeros_like(d)], 1) for d in (dk, dv))

    def later(*keys: jax.Array) -> tuple[jax.Array, ...]:
        k, v, *theirs = keys
        queries, *rest = late
        dq, dk, dv = full.backward(queries, k, v, *rest, *theirs)
        return jnp.concatenate([jnp.zeros_like(dq), dq], 1), dk, dv

    def step(carry: Any, turn: jax.Array) -> tuple[Any, None]:
        dq, carried, gradients = carry
        carried, keys = others.turn(carried, turn)
        part_dq, *part = lax.cond(others.source(turn) < others.mine, earlier, later, *keys)
        return (dq + part_dq, carried, others.add(gradients, part, turn)), None

    dq, *own = (d.astype(jnp.float32) for d in causal.backward(q, k, v, out, sums, dout, *starts))
    start = (dq, others.start(k, v, *starts[1:]), others.start_sum(*own))
    dq, _, gradients = _turns(causal, step, start, others.parts)
    dk, dv = others.home(gradients, k.dtype)
    return dq.astype(q.dtype), dk, dv
