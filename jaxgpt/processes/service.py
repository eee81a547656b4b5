"""JAX's coordination service, in a process of its own beside process 0.

In process 0 it would end with it, and all others with a crash of JAX's client, before they could say which process is
gone. Here it outlives process 0 by the few seconds that they take for that.

    python -c 'from jaxgpt.processes.service import serve; serve("[::]:4711", 4)'
"""

import signal
import subprocess
import sys
import tempfile
import time

from jaxgpt.errors import UserError

LINGER = 20.0
"""Seconds for which the service outlives process 0."""
TIMEOUT = 100
"""Seconds that processes wait for each other at the end."""
HEARTBEAT = 7 * 24 * 3600
"""Seconds without a sign of life after which JAX takes a process to be dead. The watch (peers.py) knows sooner; JAX
would abort all processes of a job that a batch system has suspended for longer, which the watch lets go on."""
_START = "import sys; from jaxgpt.processes.service import serve; serve(sys.argv[1], int(sys.argv[2]))"


class Service:
    """The process, as process 0 sees it."""

    def __init__(self, address: str, count: int) -> None:
        """Returns when it serves `count` processes at HOST:PORT. Raises UserError where it cannot."""
        command = [sys.executable, "-c", _START, address, str(count)]
        pipe = subprocess.PIPE
        with tempfile.TemporaryFile("w+") as said:  # not a pipe, which nobody would empty later
            self._process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=said)
            assert self._process.stdout is not None
            if self._process.stdout.readline() != "ready\n":
                self._process.communicate()
                said.seek(0)
                raise UserError(f"JAX's coordination service cannot serve at {address}: {said.read().strip()[-300:]}")

    def close(self) -> None:
        """Ends it at once: nobody needs it any more."""
        self._process.kill()
        self._process.communicate()


def serve(address: str, count: int) -> None:
    """Serves until process 0 is gone, and LINGER seconds more."""
    from jaxlib import _jax

    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)  # they are meant for process 0, but batch systems send them to all there are
    times = {"heartbeat_timeout": HEARTBEAT, "shutdown_timeout": TIMEOUT}
    service = _jax.get_distributed_runtime_service(address, count, **times)
    print("ready", flush=True)
    sys.stdin.read()
    time.sleep(LINGER)
    service.shutdown()
