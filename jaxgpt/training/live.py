"""Training shown while it runs: a bar with the loss in a terminal, a curve that grows in a notebook."""

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

WIDTH, HEIGHT = 560, 160
"""Of the curve, in pixels."""
_EDGE = 8
_POINTS = 400
"""Most points drawn."""
_EVERY = 0.5
"""Seconds between two pictures."""


def _notebook() -> Any:
    """IPython's display, where a notebook's kernel runs this; JAX programs elsewhere never import IPython."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(ipython, "display", None) if hasattr(shell, "kernel") else None


class Bar:
    """A line in a terminal."""

    def __init__(self, steps: int, quiet: bool) -> None:
        loss = TextColumn("loss {task.fields[loss]:.4f}")
        name, count, left = TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Progress(name, BarColumn(), count, loss, left, disable=quiet)
        self._task = self._bar.add_task("fit", total=steps, loss=float("nan"))

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, losses: Sequence[float]) -> None:
        self._bar.update(self._task, completed=len(losses), loss=losses[-1])


class Curve:
    """A picture in a notebook, drawn anew every half second and at the end."""

    def __init__(self, steps: int, display: Any) -> None:
        self._steps, self._display = steps, display
        self._losses: list[float] = []
        self._drawn = 0.0

    def __enter__(self) -> "Curve":
        self._handle = self._display.display(self._picture(), display_id=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.update(self._picture())

    def step(self, losses: Sequence[float]) -> None:
        self._losses = list(losses)
        if time.monotonic() - self._drawn >= _EVERY:
            self._drawn = time.monotonic()
            self._handle.update(self._picture())

    def _picture(self) -> Any:
        return self._display.HTML(svg(self._losses, self._steps))


def shown(steps: int, quiet: bool) -> "Bar | Curve":
    """In a notebook Curve, elsewhere Bar. quiet: shows nothing."""
    notebook = _notebook()
    return Bar(steps, quiet) if quiet or notebook is None else Curve(steps, notebook)


def svg(losses: Sequence[float], steps: int) -> str:
    """The curve of losses over `steps` steps, with its first, lowest and last value in words."""
    if not losses:
        return f"<div>0 / {steps} steps</div>"
    low, high = min(losses), max(losses)
    reach = (high - low) or 1.0
    places = sorted({round(i * (len(losses) - 1) / _POINTS) for i in range(_POINTS + 1)})
    points = " ".join(
        f"{_EDGE + (WIDTH - 2 * _EDGE) * place / max(steps - 1, 1):.1f},"
        f"{HEIGHT - _EDGE - (HEIGHT - 2 * _EDGE) * (losses[place] - low) / reach:.1f}"
        for place in places
    )
    said = f"step {len(losses)} / {steps}, loss {losses[-1]:.4f}, from {losses[0]:.4f}, lowest {low:.4f} nats a token"
    return (
        f'<div>{said}</div><svg width="{WIDTH}" height="{HEIGHT}" style="border:1px solid #ccc" '
        f'role="img" aria-label="{said}"><polyline points="{points}" fill="none" stroke="#1f77b4" '
        'stroke-width="1.5"/></svg>'
    )
