"""Ctrl-C and SIGTERM: the first asks for an orderly end, a second one ends at once."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While entered, a first SIGINT or SIGTERM is noted in `received`; a second one ends the process.

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
        self._handled = 0

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
            elif not _in_notebook():
                os._exit(128 + number[0])

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        """Takes the place of the default, which would end the process at the first signal."""
        self._handled += 1
        if self._handled > 1:
            raise KeyboardInterrupt


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules or hasattr(sys, "ps1")
