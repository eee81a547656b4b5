"""Memory that a process computing on CPU keeps: a big array made again touches no new page."""

import subprocess
import sys

import pytest

REPEATED = """
import resource
import numpy as np
from jaxgpt import host_memory
kept = host_memory.keep()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**25).sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt and huge pages are Linux's")
def test_what_is_freed_is_kept() -> None:
    found = subprocess.run([sys.executable, "-c", REPEATED], capture_output=True, text=True, check=True).stdout.split()
    if found[0] == "False":
        pytest.skip("no glibc, or no huge pages")
    # 256 MiB are 65536 pages of 4 KiB; memory given back would be touched anew
    assert int(found[1]) < 1000


HEAPS = """
import ctypes, sys, threading
from jaxgpt import host_memory
kept = host_memory.keep(int(sys.argv[1]))
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.fopen.restype = ctypes.c_void_p, ctypes.c_void_p
meet = threading.Barrier(4)
def allocate():
    meet.wait()
    libc.malloc(1000)
    meet.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
file = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt and malloc_info are Linux's")
@pytest.mark.parametrize(("devices", "one"), [(1, True), (2, True), (8, False)])
def test_many_devices_do_not_wait_for_one_heap(devices: int, one: bool) -> None:
    command = [sys.executable, "-c", HEAPS, str(devices)]
    heaps = subprocess.run(command, capture_output=True, text=True, check=True).stdout.count("<heap nr=")
    assert (heaps == 1) is one
