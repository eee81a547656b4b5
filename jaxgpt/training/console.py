"""What a run says: tables before step 0, a progress line on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Sequence
from types import TracebackType

import rich.box
from rich.console import Console as Terminal
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxgpt.training.throughput import Speed

Rows = Sequence[Sequence[object]]


def _speaks() -> bool:
    """Whether this process is the first of its run; without JAX it is the only one, and needs none to say something."""
    if sys.modules.get("jax") is None:
        return True
    from jaxgpt.processes import together

    return together.is_first()


class Console:
    """Standard output: with colour and a moving line on a terminal, else in plain lines, one a message. Of several
    processes the first one alone speaks."""

    def __init__(self) -> None:
        self._out = Terminal(highlight=False, quiet=not _speaks())

    @property
    def is_terminal(self) -> bool:
        """Whether lines can be redrawn."""
        return self._out.is_interactive and not self._out.quiet

    def say(self, text: str) -> None:
        """One message."""
        self._print(text)

    def fallback(self, text: str) -> None:
        """A choice that was made for the user, and why: "attention: XLA, since cuDNN's has no fp32"."""
        self._print(text, style="yellow")

    def table(self, title: str, rows: Rows) -> None:
        """Rows of cells under a title; numbers stand to the right."""
        cells = [[_cell(value) for value in row] for row in rows]
        columns = max((len(row) for row in cells), default=0)
        numeric = [all(isinstance(row[c], int | float) for row in rows if c < len(row)) for c in range(columns)]
        self._print(title, style="bold")
        if not self.is_terminal:
            self._plain_rows(cells, numeric)
            return
        table = Table(box=rich.box.SIMPLE, show_header=False)
        for right in numeric:
            table.add_column(justify="right" if right else "left", overflow="fold")
        for row in cells:
            table.add_row(*(escape(cell) for cell in row))
        self._out.print(table)

    def _plain_rows(self, cells: list[list[str]], numeric: list[bool]) -> None:
        widths = [max(len(row[c]) for row in cells if c < len(row)) for c in range(len(numeric))]
        for row in cells:
            aligned = (
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, numeric, strict=False)
            )
            self._print("  " + "  ".join(aligned).rstrip())

    def _print(self, text: str, style: str | None = None) -> None:
        # Lines are not wrapped: what reads them wants one message a line.
        self._out.print(Text(_shown(text, self._out.encoding), style=style or ""), soft_wrap=True)
        self._out.file.flush()

    def progress(self, steps: int) -> "Progress":
        """The line of a run of `steps` steps, to be used in a `with`."""
        return Progress(self._out if self.is_terminal else None, self, steps)


class Progress:
    """Loss and speed: one line redrawn on a terminal, a line a log step elsewhere."""

    def __init__(self, terminal: Terminal | None, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._live = None if terminal is None else Live(console=terminal, auto_refresh=False, transient=False)

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, step: int, loss: float, speed: Speed) -> None:
        """Says where the run is."""
        line = step_line(step, self._steps, loss, speed)
        if self._live is None:
            self._console.say(line)
            return
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(total=self._steps, completed=step, width=20), Text(line))
        self._live.update(grid, refresh=True)


def step_line(step: int, steps: int, loss: float, speed: Speed) -> str:
    """ "step 120/300  loss 3.1416  312 ms  13,107 tokens/s  MFU 41.2 %  56 s left"."""
    parts = [
        f"step {step:>{len(str(steps))}}/{steps}",
        f"loss {loss:.4f}",
        f"{speed.milliseconds:,.0f} ms" if speed.milliseconds >= 100 else f"{speed.milliseconds:.3g} ms",
        f"{speed.tokens_per_second:,.0f} tokens/s",
    ]
    if speed.mfu is not None:
        parts.append(f"MFU {100 * speed.mfu:.1f} %")
    parts.append(f"{duration(speed.seconds_left)} left")
    return "  ".join(parts)


def duration(seconds: float | int) -> str:
    """ "42 s", "3 min 05 s", "2 h 10 min", "4 d 03 h"."""
    whole = round(seconds)
    for size, name, part, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // part:02d} {below}"
    return f"{whole} s"


def size(count: float | int) -> str:
    """Bytes as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _shown(text: str, encoding: str) -> str:
    """The text as it can be shown: a model may write what would command the terminal or what it cannot spell."""
    safe = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    return safe.encode(encoding, "replace").decode(encoding)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
