"""How the processes of a run hear of each other: one is gone, one has failed, one is told to stop. Then all end.

Every process has a line to process 0 and a thread that watches it. A connection that closes, or over which nothing has
come for SILENT seconds, is a process that is gone: process 0 names it, tells the others, and all end with the status
RESUMABLE; where process 0 itself is gone, each says so. What ends one process with an error goes to process 0, which
says it once for all. The thread ends its process whatever the main thread waits for, so that nobody hangs in a
collective.
"""

import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

from jaxgpt.errors import RESUMABLE, UserError
from jaxgpt.processes import lines
from jaxgpt.processes.gate import Gate
from jaxgpt.processes.launch import Launch, seconds
from jaxgpt.processes.lines import Line, Message

BEAT = 2.0
"""Seconds between signs of life."""
SILENT = 30.0
"""Seconds without any after which a process is taken to be gone."""
GRACE = 4.0
"""Seconds for which process 0 waits, when one process has failed, for others that fail alike."""
_TURN = 0.25
_ASLEEP = 5.0
"""Seconds between two turns of the watch after which this process itself was stopped, not the others."""
_LEAVING = 3.0
"""Seconds for which process 0 waits for the others to end before it ends itself."""
_WORDS = 10.0
"""Seconds in which a process that ends because another is gone writes down what it was at."""

Failure = tuple[str, int]
"""One line, and an exit status."""


class Peers:
    """The other processes, as one process sees them."""

    def __init__(self, launch: Launch, host: str, found: Mapping[int, Line], server: socket.socket | None) -> None:
        self.index, self.count = launch.index, launch.count
        self.gate = Gate()
        self.noted: Callable[[str], None] = lambda text: None
        """Told, on process 0, which process has been told to stop; from another thread."""
        self.last_words: Callable[[str], object] = lambda text: None
        """Told why, where a process is gone and this one ends for it: returns a file with what it was at, or None; from
        another thread."""
        self.hosts = [host] * self.count
        self._launch, self._lines, self._server = launch, dict(found), server
        self._failures: dict[int, Failure] = {}
        self._since: float | None = None
        self._passed: dict[int, int] = {}
        self._asking = threading.Lock()
        self._ended = threading.Event()
        self._closing = False
        self._beaten, self._turned = 0.0, time.monotonic()
        for line in self._lines.values():
            self.hosts[line.index] = line.host
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def name(self, index: int) -> str:
        """ "process 1 on node7"."""
        return f"process {index} on {self.hosts[index]}"

    # What the main thread says

    def tell(self, kind: str, **fields: object) -> None:
        """Sends a message over every line."""
        for line in list(self._lines.values()):
            line.send(kind, **fields)

    def stop(self, signal: int) -> None:
        """Asks all processes to stop before the same program. From any thread."""
        if self.index == 0:
            self._ask(signal, 0)
        else:
            self.tell("stop", signal=signal)

    def fail(self, text: str, status: int) -> NoReturn:
        """Ends all processes, since this one has failed: process 0 says why, once."""
        sys.stdout.flush()
        if self.index == 0:
            self._failures[0] = (text, status)
        else:
            self.tell("failed", text=text, status=status)
            self._failures[self.index] = (text, status)
        self._thread.join(SILENT + GRACE)
        os._exit(status)

    def verdict(self) -> None:
        """Waits, where something has failed that another process's end would explain, for that to be known: the watch
        then ends this process. Returns where every process is there."""
        if self._ended.wait(SILENT + GRACE):
            self._thread.join()

    def leave(self) -> None:
        """Says that this process ends as it should; its connections may close."""
        self.tell("bye")

    def close(self) -> None:
        """Ends the watch and the connections."""
        self._closing = True
        self._thread.join()
        for line in self._lines.values():
            line.close()
        if self._server is not None:
            self._server.close()

    def end(self, text: str, status: int, told: tuple[str, ...] = (), gone: bool = False) -> NoReturn:
        """Ends all processes at once, with one line each for `text` and `told`. gone: since one is. From any thread."""
        self._ended.set()
        said = "".join(f"jaxgpt: error: {' '.join(one.split())}\n" for one in (text, *told) if one)
        os.write(2, said.encode())
        if self.index == 0:
            self.tell("end", status=status, text="", gone=text if gone else "")
        try:
            if gone and (file := self._write_down(text, status)) is not None:
                os.write(2, f"jaxgpt: stacks and collectives: {file}\n".encode())
        finally:  # whatever befell that
            if self.index == 0:
                self._see_off()
            os._exit(status)

    def _write_down(self, text: str, status: int) -> object:
        """Last words, for which there is time until _WORDS seconds are over, whatever hinders the writing."""
        timer = threading.Timer(_WORDS, os._exit, (status,))
        timer.daemon = True
        timer.start()
        file = self.last_words(text)
        timer.cancel()
        return file

    def _see_off(self) -> None:
        """Waits for the others to end first: what was sent to them might be lost with this process's connections."""
        until, there = time.monotonic() + _LEAVING, list(self._lines.values())
        for line in there:
            line.connection.settimeout(_TURN / len(there))
        while there and time.monotonic() < until:
            there = [line for line in there if line.receive() is not None]

    # What the watch hears

    def _watch(self) -> None:
        with selectors.DefaultSelector() as ready:
            for line in self._lines.values():
                ready.register(line.connection, selectors.EVENT_READ, line)
            if self._server is not None:
                ready.register(self._server, selectors.EVENT_READ)
            while not self._closing:
                for key, _ in ready.select(_TURN):
                    if isinstance(key.data, Line):
                        self._read(key.data, ready)
                    else:
                        self._late()
                self._beat()
                self._judge()

    def _read(self, line: Line, ready: selectors.BaseSelector) -> None:
        messages = line.receive()
        for message in messages or ():
            self._hear(line, message)
        if messages is None:
            ready.unregister(line.connection)
            self._lines.pop(line.index)
            if not line.left and line.index not in self._failures and not self._closing:
                self._gone(line, "its connection has closed")

    def _late(self) -> None:
        """One that comes when all are there already."""
        assert self._server is not None
        with suppress(OSError, UserError):
            connection, _ = self._server.accept()
            lines.introduced(connection, self._launch, self._lines)

    def _hear(self, line: Line, message: Message) -> None:
        match message["kind"]:
            case "stop":
                self._ask(int(message["signal"]), line.index)
            case "ask":
                line.send("passed", programs=self.gate.hold(int(message["signal"])))
            case "passed":
                self._passed[line.index] = int(message["programs"])
                self._agree()
            case "until":
                self.gate.release(int(message["programs"]))
            case "failed":
                self._failures[line.index] = str(message["text"]), int(message["status"])
            case "bye":
                line.left = True
            case "end":
                self._ended.set()
                try:
                    if gone := str(message.get("gone", "")):
                        self._write_down(gone, int(message["status"]))
                finally:
                    os._exit(int(message["status"]))

    def _ask(self, signal: int, index: int) -> None:
        with self._asking:
            if 0 in self._passed:
                return
            self._passed[0] = self.gate.hold(signal)
            if index:
                self.noted(self.name(index))
            self.tell("ask", signal=signal)
        self._agree()

    def _agree(self) -> None:
        with self._asking:
            if len(self._passed) == self.count:
                until = max(self._passed.values())
                self.tell("until", programs=until)
                self.gate.release(until)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beaten >= BEAT:
            self._beaten = now
            self.tell("beat")
        awake, self._turned = now - self._turned < _ASLEEP, now
        for line in list(self._lines.values()):
            line.heard = line.heard if awake else now
            if now - line.heard > SILENT and not line.left:
                self._gone(line, f"nothing was heard of it for {SILENT:g} s")

    def _gone(self, line: Line, how: str) -> NoReturn:
        text = f"{self.name(line.index)} is gone ({how}); the same command goes on from the last checkpoint"
        self.end(text, RESUMABLE, gone=True)

    def _judge(self) -> None:
        """On process 0: says what has failed, when all have or the time for it is over, and ends all."""
        if self.index or not self._failures:
            return
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if len(self._failures) < self.count and now - self._since < GRACE:
            return
        said = spoken(self._failures, self.name)
        status = self._failures.get(0, next(iter(self._failures.values())))[1]
        self.end(said[0], status, tuple(said[1:]))


def spoken(failures: Mapping[int, Failure], name: Callable[[int], str]) -> list[str]:
    """One line for each thing that has failed, process 0's first; what it has met itself needs no name."""
    by_text: dict[str, list[int]] = {}
    for index in sorted(failures):
        by_text.setdefault(failures[index][0], []).append(index)
    return [text if 0 in found else f"{', '.join(map(name, found))}: {text}" for text, found in by_text.items()]


def meet(launch: Launch, port: Callable[[], int]) -> tuple[Peers, int]:
    """Waits until all processes are there. port: of process 0, for what else needs one; it is told to all.

    Raises UserError, in one line on every process that can be reached.
    """
    host, within = socket.gethostname(), seconds()
    if launch.index == 0:
        server, found = lines.receive_all(launch, within)
        peers, chosen = Peers(launch, host, found, server), port()
        peers.tell("welcome", hosts=peers.hosts, port=chosen)
    else:
        line, welcome = lines.reach(launch, host, within)
        peers, chosen = Peers(launch, host, {0: line}, None), int(welcome["port"])
        peers.hosts = [str(one) for one in welcome["hosts"]]
    peers.start()
    return peers, chosen
