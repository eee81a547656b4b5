"""Values copied out of a mapped file into memory that a CPU device can take as it is, on all cores, in an order that
caches like."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_LINE = 64
"""Bytes of a cache line; XLA takes memory of the host as its own where it begins at one."""
_SMALL = 2**20
"""Bytes that are not worth a second thread."""
_THREADS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""More do not read faster."""


def zeros(shape: tuple[int, ...]) -> np.ndarray:
    """fp32 zeros that begin at a cache line."""
    size = int(np.prod(shape)) * 4
    whole = np.zeros(size + _LINE, np.uint8)
    first = -whole.ctypes.data % _LINE
    return whole[first : first + size].view(np.float32).reshape(shape)


def copy(out: np.ndarray, values: np.ndarray) -> None:
    """out[...] = values, of the same shape.

    Where the dimension along which values lie side by side is another than out's last, it is taken a cache line at a
    time: each line is then read once, where a copy row by row of out reads it for every one of its values.
    """
    if out.nbytes < _SMALL:
        out[...] = values
        return
    steps = zip(values.strides, values.shape, strict=True)
    axis = int(np.argmin([abs(stride) if size > 1 else np.inf for stride, size in steps]))
    crossed = axis != out.ndim - 1
    axis = axis if crossed else int(np.argmax(out.shape))
    share = -(-out.shape[axis] // _THREADS)
    line = _LINE // values.itemsize if crossed else share
    share = -(-share // line) * line

    def some(begin: int) -> None:
        for first in range(begin, min(begin + share, out.shape[axis]), line):
            place = (slice(None),) * axis + (slice(first, first + line),)
            out[place] = values[place]

    list(_threads().map(some, range(0, out.shape[axis], share)))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="copy")
