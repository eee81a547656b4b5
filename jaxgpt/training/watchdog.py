"""A watchdog: where a step, or a part of a run beside the steps, takes far too long, the process ends and says why.

    with Watchdog(run, factor=20, collectives=...) as watchdog:
        watchdog.stepped(10)                  # step 10 is done
        with watchdog.phase("save"): ...      # does not count as a step's time, and has a time of its own
        watchdog.end("process 3 is gone")     # from any thread

It ends by os._exit, with STATUS: a thread that waits for a device or a peer can be ended in no other way. First it
writes the stacks of all threads to stderr and into RUN/faults/, what the run was at, and the collectives of a step.
What is on the disk stays; the same command goes on from the last checkpoint.
"""

import faulthandler
import itertools
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TypeVar

from jaxgpt.processes import together

STATUS = 69
"""Exit status of a process that the watchdog ended: EX_UNAVAILABLE of sysexits.h."""
STEP = 300.0
"""Seconds that steps may take between two readings, however quick they are."""
UNKNOWN = 1800.0
"""Seconds for what no median is known of: the first steps, a batch's reading, a batch of a validation."""
SLOW = {"save": 7200.0, "restore": 7200.0}
"""Seconds for what a disk determines."""
POLL = 1.0
"""Seconds between two looks: how late the end may come."""
STOPPED = 30.0
"""Seconds between two looks that tell of a process that was itself stopped, as batch systems do: they do not count."""
LAST_WORDS = 30.0
"""Seconds from the end's beginning in which the process is gone, whatever hinders the writing."""
KEPT = 64
"""Readings whose median counts."""

T = TypeVar("T")


@dataclass
class _Phase:
    name: str
    since: float
    """By the clock; moved on by what phases inside of it have taken."""


class Watchdog:
    """Watches from a thread of its own while entered. Times are of a monotonic clock: no set clock ends a run."""

    def __init__(
        self,
        run: Path,
        factor: float,
        every: int = 1,
        collectives: Callable[[], list[str]] = list,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        """factor: times the median that a step may take; 0: nothing is watched. every: most steps between two readings,
        before which nothing is known of them. collectives: lines that name those of a
        step, asked for at the end. clock, leave: what a test may put in the place of time and end."""
        self._run, self._factor, self._every, self._collectives = run, factor, every, collectives
        self._clock, self._leave = clock, leave
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._phases = [_Phase("step", clock())]
        self._step = 0
        self._looked = clock()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._factor:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._factor:
            self._thread.join()

    def began(self, step: int) -> None:
        """Steps begin, when `step` is done."""
        with self._lock:
            self._step = step
            self._phases[0].since = self._clock()

    def stepped(self, step: int) -> None:
        """`step` is done: the time of those since the last reading counts among the median's."""
        with self._lock:
            now, base = self._clock(), self._phases[0]
            if step > self._step:
                self._steps.append((now - base.since) / (step - self._step))
            self._step, base.since = step, now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is done in it is no step's time, nor an outer phase's. "compile" has no limit."""
        with self._lock:
            self._phases.append(_Phase(name, self._clock()))
            began = self._phases[-1].since
        try:
            yield
        finally:
            with self._lock:
                self._phases.pop()
                self._phases[-1].since += self._clock() - began

    def beat(self) -> None:
        """The phase that runs has come on, and its time begins anew."""
        with self._lock:
            self._phases[-1].since = self._clock()

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """The items, with the phase around the making of each."""
        iterator = iter(items)
        while True:
            with self.phase(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def limit(self) -> tuple[str, float | None]:
        """The phase that runs, and seconds that it may take; None: as many as it needs."""
        with self._lock:
            return self._limit(len(self._phases) - 1)

    def _limit(self, at: int) -> tuple[str, float | None]:
        name = self._phases[at].name
        if name == "compile":
            return name, None
        if at == 0 and len(self._steps) > 1:
            return name, max(STEP, (self._factor + self._every) * statistics.median(self._steps))
        return name, SLOW.get(name, UNKNOWN)

    def look(self) -> str | None:
        """What to say, where the phase that runs takes too long. To be called every POLL seconds."""
        with self._lock:
            now, phase = self._clock(), self._phases[-1]
            if now - self._looked > STOPPED:
                phase.since = min(now, phase.since + now - self._looked)
            self._looked = now
            (name, limit), spent = self._limit(len(self._phases) - 1), now - phase.since
            if limit is None or spent <= limit:
                return None
            return f"{name} after step {self._step} has taken {spent:.0f} s, and may take {limit:.0f} s"

    def end(self, reason: str) -> None:
        """Ends the process with STATUS, and says why; from any thread, once."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        timer = threading.Timer(LAST_WORDS, self._leave, (STATUS,))
        timer.daemon = True
        timer.start()
        try:
            print(f"jaxgpt: error: {self._said(reason)}; the run can be resumed", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=2, all_threads=True)
            if (file := self.write_down(reason)) is not None:
                print(f"jaxgpt: stacks and collectives: {file}", file=sys.stderr, flush=True)
        finally:
            timer.cancel()
            self._leave(STATUS)

    def write_down(self, reason: str) -> Path | None:
        """Writes what this process was at into RUN/faults/: phase, stacks of all threads, the collectives of a step.
        Returns the file; None where it could not be begun. From any thread."""
        try:
            (self._run / "faults").mkdir(exist_ok=True)
            with self._file() as out:
                with suppress(OSError):  # of a full disk: the file has what there was room for
                    print(self._said(reason), file=out, flush=True)
                    faulthandler.dump_traceback(file=out, all_threads=True)
                    line = "collectives of a step, of which the last one may be waiting for a peer:"
                    print(line, file=out, flush=True)
                    print("\n".join(self._collectives()), file=out, flush=True)
                return Path(out.name)
        except OSError:
            return None

    def _said(self, reason: str) -> str:
        with self._lock:
            phases = " in ".join(phase.name for phase in reversed(self._phases))
            return f"{reason}; in phase {phases}, after step {self._step}"

    def _file(self) -> IO[str]:
        """A new file, named by this process's number: in containers, all may have the same id."""
        for number in itertools.count(1):
            name = f"stacks-step-{self._step}-process-{together.index()}{f'-{number}' if number > 1 else ''}.txt"
            with suppress(FileExistsError):
                return (self._run / "faults" / name).open("x", encoding="utf-8")
        raise AssertionError("numbers have no end")

    def _watch(self) -> None:
        while not self._over.wait(POLL):
            late = self.look()
            if late is not None:
                self.end(late)
                return
