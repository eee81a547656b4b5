"""Values inside a block, by name, for whoever looks; to everybody else nothing."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

SITES = ("attention", "mlp", "")
"""What attention and the feed-forward layer add to the residual stream, and the block's output."""

_taken: ContextVar[dict[str, jax.Array] | None] = ContextVar("taken", default=None)


def tap(site: str, x: jax.Array) -> jax.Array:
    """x itself; kept under its name where taps are open."""
    taken = _taken.get()
    if taken is not None:
        taken[site] = x
    return x


@contextlib.contextmanager
def taps() -> Iterator[dict[str, jax.Array]]:
    """What the blocks that are traced within it have at each site; of several blocks the last one's."""
    taken: dict[str, jax.Array] = {}
    token = _taken.set(taken)
    try:
        yield taken
    finally:
        _taken.reset(token)
