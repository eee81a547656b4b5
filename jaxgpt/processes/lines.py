"""Connections between process 0 and each other one, over which lines of JSON go; and how they come about.

The coordinator's port is process 0's. There all others introduce themselves, so that a wrong number, one index used
twice, a process that never came and a coordinator that cannot be reached are each known by name, before JAX is asked
for anything.
"""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from jaxgpt.errors import UserError
from jaxgpt.processes.launch import JOIN, Launch

VERSION = 1
LOCAL = ("localhost", "127.0.0.1", "::1")
_MOST = 2**16
"""Longest line, in bytes."""

Message = dict[str, Any]


class Line:
    """One connection. Messages may be sent from any thread and are received by one."""

    def __init__(self, connection: socket.socket, index: int, host: str) -> None:
        connection.settimeout(10.0)
        self.connection, self.index, self.host = connection, index, host
        self.heard = time.monotonic()
        """When something came last."""
        self.left = False
        """Whether the other side has said that it goes."""
        self._rest = b""
        self._sending = threading.Lock()

    @property
    def name(self) -> str:
        """ "process 1 on node7"."""
        return f"process {self.index} on {self.host}"

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message; where the other side is gone, nothing: receive says so."""
        with self._sending, suppress(OSError):
            self.connection.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """What has come; waits for something. None where the other side is gone, or is not one of ours."""
        try:
            data = self.connection.recv(_MOST)
        except TimeoutError:
            return []
        except OSError:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > _MOST:
            return None
        self.heard = time.monotonic()
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return found if all(isinstance(one, dict) and "kind" in one for one in found) else None

    def first(self, within: float) -> Message | None:
        """The first message; None where none comes within so many seconds."""
        until = time.monotonic() + within
        while (left := until - time.monotonic()) > 0:
            self.connection.settimeout(left)
            if (found := self.receive()) is None:
                return None
            if found:
                self.connection.settimeout(10.0)
                return found[0]
        return None

    def close(self) -> None:
        """Ends the connection."""
        self.connection.close()


def receive_all(launch: Launch, within: float) -> tuple[socket.socket, dict[int, Line]]:
    """Process 0's part: the line to every other process, by index, and the socket that goes on listening.

    Raises UserError where the port is taken, another process counts otherwise, or one does not come in time.
    """
    server = _listening(launch)
    lines: dict[int, Line] = {}
    until = time.monotonic() + within
    try:
        while len(lines) < launch.count - 1:
            server.settimeout(max(until - time.monotonic(), 0.01))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                raise _missing(launch, lines, within) from None
            if (line := introduced(connection, launch, lines)) is not None:
                lines[line.index] = line
    except UserError:
        for line in lines.values():
            line.send("end", status=2, text="")
            line.close()
        server.close()
        raise
    return server, lines


def introduced(connection: socket.socket, launch: Launch, known: dict[int, Line]) -> Line | None:
    """The line to a process that introduces itself; None for one that is turned away, and is told why.

    Raises UserError where it was started with another number of processes: one of both is wrong.
    """
    line = Line(connection, -1, "?")
    hello = line.first(within=5.0)
    fields = {} if hello is None else hello
    index, count = fields.get("index"), fields.get("count")
    if fields.get("version") != VERSION or not isinstance(index, int) or not isinstance(count, int):
        line.close()  # a stranger
        return None
    line.index, line.host = index, str(fields.get("host"))
    if count != launch.count:
        text = f"--processes {count} of {line.name}: process 0 has --processes {launch.count}; give all the same"
        line.send("end", status=2, text=text)
        line.close()
        raise UserError(text)
    if line.index in known or line.index == 0:
        other = f" ({known[line.index].name})" if line.index in known else ""
        text = f"--process {line.index}: the run has a process of this index already{other}; give each its own"
        line.send("end", status=2, text=text)
        line.close()
        return None
    return line


def reach(launch: Launch, host: str, within: float) -> tuple[Line, Message]:
    """Another process's part: the line to process 0, and what that says when all are there. Raises UserError."""
    until = time.monotonic() + within
    line = Line(_connected(launch, within), 0, launch.host)
    line.send("hello", version=VERSION, index=launch.index, count=launch.count, host=host, pid=os.getpid())
    # Process 0 may have begun to wait later, and says itself who is missing.
    welcome = line.first(until - time.monotonic() + within)
    if welcome is None:
        raise UserError(f"--coordinator {launch.coordinator}: {line.name} is gone, before all processes had come")
    if welcome["kind"] == "end" and welcome["text"]:
        raise UserError(str(welcome["text"]))
    if welcome["kind"] == "end":  # process 0 says why
        raise SystemExit(int(welcome["status"]))
    return line, welcome


def _connected(launch: Launch, within: float) -> socket.socket:
    until, reason = time.monotonic() + within, "no answer"
    while (left := until - time.monotonic()) > 0:
        try:
            return socket.create_connection((launch.host, launch.port), timeout=left)
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(min(0.2, max(left, 0.0)))
    raise UserError(
        f"--coordinator {launch.coordinator}: cannot be reached within {within:g} s ({reason}); start process 0 there, "
        f"or set {JOIN} to wait longer"
    )


def _listening(launch: Launch) -> socket.socket:
    """Where the others are expected: on this host alone, if the coordinator is named so."""
    try:
        if launch.host in LOCAL:
            family = socket.AF_INET6 if launch.host == "::1" else socket.AF_INET
            return socket.create_server((launch.host, launch.port), family=family, backlog=launch.count)
        if socket.has_dualstack_ipv6():
            there = ("", launch.port)
            return socket.create_server(there, family=socket.AF_INET6, backlog=launch.count, dualstack_ipv6=True)
        return socket.create_server(("", launch.port), backlog=launch.count)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise UserError(
            f"--coordinator {launch.coordinator}: process 0 cannot listen there ({reason}); "
            "give a port that is free on its host"
        ) from None


def _missing(launch: Launch, lines: dict[int, Line], within: float) -> UserError:
    absent = [index for index in range(1, launch.count) if index not in lines]
    named = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    which = f"process {named} has" if len(absent) == 1 else f"processes {named} have"
    return UserError(
        f"--processes {launch.count}: {which} not come to {launch.coordinator} within {within:g} s; "
        f"start all, or set {JOIN} to wait longer"
    )
