"""Compiling without most optimizations, which take over half of a tiny program's time and move no number elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def unoptimized(wanted: bool = True) -> Iterator[None]:
    """Within it, programs are compiled so, if wanted."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", wanted)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
