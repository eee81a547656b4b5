"""Signals to a process: the first is noted, whatever the main thread waits for; a second one of any kind ends it."""

import signal
import subprocess
import sys

import pytest

from jaxgpt.errors import RESUMABLE

INT, TERM, USR1, USR2 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
WAITS = """
import os, sys, threading
from jaxgpt.training.signals import StopSignals, end_resumable
def noted(name):
    print(name, flush=True)
with StopSignals(end_resumable if "outside" in sys.argv else noted):
    print("ready", flush=True)
    hold = threading.Lock()
    hold.acquire()
    hold.acquire()  # as for a device
"""


def told(signals: list[signal.Signals], *args: str) -> tuple[int, list[str], str]:
    """Exit status of a process that waits and is sent signals, each after it has said something; and what it says."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WAITS, *args], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = []
        for number in signals:
            said.append(process.stdout.readline().strip())
            process.send_signal(number)
        try:
            status = process.wait(timeout=60)
        finally:
            process.kill()
        return status, said, process.stderr.read()


@pytest.mark.parametrize("pair", [(USR1, USR1), (USR1, TERM), (TERM, USR2), (USR2, INT), (INT, INT)], ids=str)
def test_any_second_signal_ends_at_once(pair: tuple[signal.Signals, signal.Signals]) -> None:
    assert told(list(pair)) == (128 + pair[1], ["ready", pair[0].name], "")


@pytest.mark.parametrize("number", [TERM, USR1], ids=str)
def test_where_no_step_runs_the_first_ends_with_the_status_that_says_resumable(number: signal.Signals) -> None:
    status, _, error = told([number], "outside")
    assert status == RESUMABLE
    assert error == f"jaxgpt: {number.name}: no step runs that could be saved; the same command goes on\n"
