"""Steps of several processes run in turn, on a machine that others use as well. Needs nothing but Python.

Each contestant is a process of its own, perhaps of another environment, that waits until it is asked for one step. What
is compared is so measured under the same load; and a step is quiet when all other processes together used little of the
processors while it ran, which Linux tells in /proc/stat.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

QUIET = 0.15
"""Cores that other processes may use during a quiet step."""


@dataclass(frozen=True)
class Sample:
    """One step."""

    seconds: float
    others: float | None
    """Cores that other processes used meanwhile; None where the system does not tell."""
    loss: float
    """As the step returned it."""

    @property
    def quiet(self) -> bool:
        return self.others is not None and self.others < QUIET


@dataclass(frozen=True)
class Quartiles:
    """Seconds a step."""

    first: float
    median: float
    third: float


def quartiles(samples: Sequence[Sample]) -> Quartiles:
    """Of at least two samples."""
    return Quartiles(*statistics.quantiles((s.seconds for s in samples), n=4, method="inclusive"))


def _busy() -> float | None:
    """Seconds that all processors together have worked since the start of the system."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, stolen, *_ = map(int, fields)
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


class Contestant:
    """A process that runs one step whenever it is asked. It is started at once; its first step is taken apart."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.name = name
        began = time.perf_counter()
        variables = dict(os.environ) | (environment or {})
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        self.about = self._answer()
        self._ask()
        self._answer()
        self.first_step = time.perf_counter() - began
        """Seconds from the start of the process to the end of its first step."""

    def step(self) -> Sample:
        """One step, timed inside of the process."""
        before, began = _busy(), time.perf_counter()
        self._ask()
        answer = self._answer()
        after, took = _busy(), time.perf_counter() - began
        others = None if before is None or after is None else max(0.0, after - before - answer["cpu"]) / took
        return Sample(answer["seconds"], others, answer["loss"])

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _ask(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: its process ended (exit status {self._process.wait()}); see its message above")
        return json.loads(line)


def own_output() -> TextIO:
    """This process's standard output for answers alone: what libraries print goes to standard error from here on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(step: Callable[[], float], about: dict[str, object], answers: TextIO | None = None) -> None:
    """A contestant's process: runs step, which returns the loss when it is done, for each line that comes in."""
    answers = answers or own_output()
    print(json.dumps(about), file=answers, flush=True)
    for _ in sys.stdin:
        cpu, began = time.process_time(), time.perf_counter()
        loss = step()
        answer = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "loss": loss}
        print(json.dumps(answer), file=answers, flush=True)


def in_turn(
    contestants: Sequence[Contestant], count: int, warm_up: int, most: int
) -> tuple[dict[str, list[Sample]], bool]:
    """`count` samples of each, and whether all of them are quiet.

    The contestants step in turn, until `count` rounds were quiet for all of them; after `most` rounds those count in
    which others did least.
    """
    for contestant in contestants:
        for _ in range(warm_up):
            contestant.step()
    rounds: list[list[Sample]] = []
    while len(rounds) < most and sum(all(s.quiet for s in one) for one in rounds) < count:
        rounds.append([contestant.step() for contestant in contestants])
    calm = sorted(rounds, key=lambda one: max(s.others or 0.0 for s in one))[:count]
    samples = {c.name: [one[i] for one in calm] for i, c in enumerate(contestants)}
    return samples, all(s.quiet for one in calm for s in one)
