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
