"""A profiler trace of chosen steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxgpt.errors import UserError


class Tracer:
    """Traces steps first .. stop - 1 into a folder, each as one step of the trace, and says how to open it."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, say: Callable[[str], None]) -> None:
        self._first, self._stop = steps or (0, 0)
        self._folder = folder
        self._say = say
        self._running = False

    def announce(self, done: int, last: int) -> None:
        """Says so where the run, `done` steps old, does not pass all of the steps."""
        if self._stop and not (done < self._first and self._stop - 1 <= last):
            self._say(
                f"profile: steps {self._first} to {self._stop - 1} are not all among those to come, "
                f"{done + 1} to {last}; what of them is, is traced"
            )

    @contextmanager
    def step(self, step: int, before: Any) -> Iterator[None]:
        """Around the dispatch of a step. `before`: arrays that are ready when the steps before it are done."""
        if self._first <= step < self._stop and not self._running:
            jax.block_until_ready(before)
            self._start()
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def after(self, step: int, results: Any) -> None:
        """Ends the trace after its last step. `results`: arrays that are ready when `step` is done."""
        if self._running and step + 1 >= self._stop:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """Ends a trace that is running."""
        if not self._running:
            return
        self._running = False
        try:
            jax.profiler.stop_trace()
        except (OSError, jax.errors.JaxRuntimeError) as error:
            raise UserError(f"{self._folder}: the trace cannot be written ({error})") from None
        self._say(
            f"profile: {self._folder}; to open it: pip install xprof && xprof --logdir {self._folder} --port 8791"
        )

    def _start(self) -> None:
        try:
            self._folder.mkdir(exist_ok=True)
            jax.profiler.start_trace(self._folder)
        except OSError as error:
            raise UserError(f"{self._folder}: the trace cannot be written ({error.strerror or error})") from None
        self._running = True
