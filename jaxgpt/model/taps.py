"""Values inside a block, by name, for whoever looks; to everybody else nothing."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax

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


def as_far_as(
    wanted: jax.Array | int, pick: Callable[[dict[str, jax.Array]], jax.Array], run: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """What to run in the place of each block: those before the wanted layer as they are; of that layer what pick takes
    of its sites, which those after it pass on."""

    def body(w: Any, x: jax.Array, layer: jax.Array, c: Any) -> jax.Array:
        def tapped() -> jax.Array:
            with taps() as taken:
                run(w, x, layer, c)
            return pick(taken)

        def after() -> jax.Array:
            return lax.cond(layer == wanted, tapped, lambda: x)

        return lax.cond(layer < wanted, lambda: run(w, x, layer, c), after)

    return body
