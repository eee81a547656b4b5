"""Signals that ask a run to end: the first for an orderly end, a second one of any kind at once.

SIGUSR1 and SIGUSR2 are what Slurm and other batch systems warn with before they end a job (sbatch --signal=USR1@120).
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from jaxgpt.errors import RESUMABLE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopSignals:
    """While entered, the first signal is noted in `received`; a second one, whichever it is, ends the process with the
    status that shells know, 128 + its number: what is committed stays, what is being saved does not become a
    checkpoint.

    A thread hears of them as they come, even while the main thread waits for a device: a Python handler would not
    run until that wait is over. In a notebook the second one is a KeyboardInterrupt, since its process is not ours
    to end. What was there before is put back at the end. Outside of the main thread, where Python allows no
    handlers, nothing is changed and nothing received.
    """

    def __init__(self, noted: Callable[[str], None]) -> None:
        """`noted` is told the name of the first signal, from another thread."""
        self.received: signal.Signals | None = None
        self._noted = noted
        self._main = threading.current_thread() is threading.main_thread()
        self._handled = False

    def __enter__(self) -> "StopSignals":
        if not self._main:
            return self
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._before = {one: signal.signal(one, self._handle) for one in SIGNALS}
        self._fd_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._main:
            return
        signal.set_wakeup_fd(self._fd_before)
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._write.close()
        self._thread.join()
        self._read.close()

    def _listen(self) -> None:
        while number := self._read.recv(1):
            if number[0] not in SIGNALS:
                continue
            if self.received is None:
                self.received = signal.Signals(number[0])
                self._noted(self.received.name)
            elif not in_notebook():
                os._exit(128 + number[0])

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        """Takes the place of the default, which would end the process at the first signal."""
        if self._handled:
            raise KeyboardInterrupt
        self._handled = True


def end_resumable(name: str) -> None:
    """What a command does at the first signal where there is nothing yet, or no longer, to be saved: ends as after one
    that a run was saved for."""
    os.write(2, f"jaxgpt: {name}: no step runs that could be saved; the same command goes on\n".encode())
    os._exit(RESUMABLE)


def in_notebook() -> bool:
    """Whether the process is somebody's session, which is not a run's to end."""
    return "ipykernel" in sys.modules or hasattr(sys, "ps1")
