"""Processes that share a long task: each is a Python of its own, started afresh.

Neither fork nor multiprocessing is used: the one would copy a process in which JAX's threads run, the other runs the
user's own script again in every worker.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any

from jaxgpt.errors import UserError, told_of

_START = "from jaxgpt.data.workers import serve; serve()"


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """`count` processes, used in a `with`. One or none: all is done in this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def map(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        """function of each task, in order; function is one of a module, not made inside another.

        Raises UserError as the function does and where a worker was killed, RuntimeError where it failed.
        """
        if self.count < 2:
            return map(function, tasks)
        self._start()
        assert self._threads is not None
        return self._threads.map(lambda task: self._ask(function, task), tasks)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if kind is not None:
                process.kill()
            if process.stdin is not None:
                process.stdin.close()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _start(self) -> None:
        if self._threads is not None:
            return
        self._threads = ThreadPoolExecutor(self.count, "worker")
        # The library's own threads would be as many again in each process.
        env = os.environ | {
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        for _ in range(self.count):
            command = [sys.executable, "-c", _START]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
            self._processes.append(process)
            self._idle.put(process)

    def _ask(self, function: Callable[[Any], Any], task: Any) -> Any:
        process = self._idle.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, (function, task))
            good, answer = _receive(process.stdout)
        except (EOFError, BrokenPipeError):
            if (status := process.wait()) < 0:
                raise UserError(
                    f"a process that reads data was ended by signal {-status} (9: the system had no memory left for "
                    "it); give the same command again, on fewer cores"
                ) from None
            raise RuntimeError(f"a worker of data preparation has ended with status {status}") from None
        finally:
            self._idle.put(process)
        if good:
            return answer
        raise UserError(answer)


def serve() -> None:
    """What a worker runs: answers questions on its standard input until that ends."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process ends the others
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, task = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = True, function(task)
        except (UserError, OSError) as error:
            if (told := told_of(error)) is None:
                raise
            answer = False, told[0]
        _send(answers, answer)


def _send(pipe: IO[bytes], message: object) -> None:
    content = pickle.dumps(message)
    pipe.write(len(content).to_bytes(8, "little") + content)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(pipe.read(int.from_bytes(head, "little")))
