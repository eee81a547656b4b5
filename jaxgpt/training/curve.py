"""The loss curve of a run as a picture."""

import math
import os
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxgpt.errors import UserError
from jaxgpt.training.metrics import Record, read


def draw(run: Path) -> Path:
    """Draws training and validation loss of the whole history to `loss.png` in the run folder. Returns its path."""
    records = read(run)
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    _line(axes, records, "train", color="tab:blue", linewidth=1)
    _line(axes, records, "validation", color="tab:orange", linewidth=1.5, marker="o", markersize=4)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("loss (nats a token)")
    axes.set_title(run.resolve().name)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    target = run / "loss.png"
    drawn = run / "loss.partial.png"
    try:
        figure.savefig(drawn)
        os.replace(drawn, target)
    except OSError as error:
        drawn.unlink(missing_ok=True)
        raise UserError(f"{target}: cannot be written ({error.strerror or error})") from None
    return target


def _line(axes: Axes, records: list[Record], kind: str, **style: Any) -> None:
    points = [(r["step"], float(r["loss"])) for r in records if r.get("kind") == kind and "loss" in r]
    if not any(math.isfinite(loss) for _, loss in points):
        return
    if len(points) == 1:
        # A line through one point cannot be seen.
        style["marker"] = "o"
    steps, losses = zip(*points, strict=True)
    axes.plot(steps, losses, label=f"{kind}, at the end {losses[-1]:.3f}", **style)
