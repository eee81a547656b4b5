"""Memory of a process that computes on CPU: how much there is, kept between steps, and in huge pages.

XLA on CPU allocates a step's temporaries anew at every step, and glibc hands memory of that size back to the kernel
each time: so every step touches it for the first time, page by page of 4 KiB. That costs a fifth to a quarter of a
small model's step (experiments/bench_cpu.py measures it), part of it in page faults, part in address translation. Here
glibc is told to keep what it has (mallopt(3)), and the kernel that the heap may lie in huge pages (madvise(2)). For one
or two devices there is one heap: only it holds arrays of any size. More devices than that would wait for each other at
it, a third of a step where the compiler has left it in pieces; they have a heap for each thread, as glibc does by
itself. Memory is not taken before it is used, and nothing is changed in how much is used.
"""

import ctypes
import functools
import mmap
import os
import sys
from pathlib import Path

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX, ARENA_MAX = -1, -2, -4, -8
"""mallopt's parameters, from glibc's malloc.h."""
NEVER = -1
ONE_HEAP = 2
"""Most devices that share a heap."""


@functools.cache
def keep(devices: int = 1) -> bool:
    """Makes this process, which computes on so many CPU devices, keep its memory and lay it in huge pages; whether that
    was possible.

    Only with glibc on Linux; elsewhere, and where the kernel has no huge pages or not the address space, nothing.
    Arrays and programs that are there already stay where they are.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    shared = ((ARENA_MAX, 1),) if devices <= ONE_HEAP else ()
    for parameter, value in (*shared, (MMAP_MAX, 0), (TRIM_THRESHOLD, NEVER), (TOP_PAD, 2**26)):
        libc.mallopt(parameter, value)
    return _reserve(libc, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def _reserve(libc: ctypes.CDLL, size: int) -> bool:
    """Grows the heap by size bytes of addresses, without memory behind them yet, and asks for huge pages there."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.free(libc.malloc(size))  # what malloc returns it takes back untouched, since it may not trim
    heap = _heap()
    return heap is not None and libc.madvise(heap[0], heap[1] - heap[0], mmap.MADV_HUGEPAGE) == 0


def _heap() -> tuple[int, int] | None:
    """Addresses of the process's heap, whole pages."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            first, last = line.split()[0].split("-")
            return int(first, 16), int(last, 16)
    return None


def available() -> int:
    """Bytes that processes can still take; where the system does not say it, all there are."""
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as lines:
            told = dict(line.split(":", 1) for line in lines)
        if "MemAvailable" in told:
            return int(told["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
