"""What a pipeline does, told before it runs: layers of each stage, the schedule as a picture, rings, idle share."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.pipeline import picture
from jaxgpt.pipeline.buffers import Plan, plan
from jaxgpt.pipeline.checker import Facts, check, durations
from jaxgpt.pipeline.placement import Placement
from jaxgpt.pipeline.schedule import Schedule
from jaxgpt.training.console import Rows
from jaxgpt.training.program import Program

NARROWEST = 60
"""Columns of a picture, at least."""


@dataclass(frozen=True)
class Pipeline:
    """A schedule with its placement, and what the checker and the planner of rings found."""

    schedule: Schedule
    placement: Placement
    facts: Facts
    plan: Plan

    @staticmethod
    def of(program: Program) -> "Pipeline | None":
        """The program's pipeline; None on one stage."""
        if program.sizes["pipe"] == 1:
            return None
        table = program.schedule
        return Pipeline(table, program.step_of.placement, check(table), plan(table))

    @property
    def idle_share(self) -> float:
        """The schedule's, with parts as long as they have layers: a slot lasts as long as its longest."""
        s = self.schedule
        part = np.maximum(s.chunk, 0) * s.stages + np.arange(s.stages)
        length = durations(s) * np.array(self.placement.parts)[part]
        return 1 - float(length.sum() / (s.stages * length.max(axis=2).sum()))

    def tables(self) -> list[tuple[str, Rows]]:
        """Title and rows of each table; the picture is as wide as the terminal."""
        s, p = self.schedule, self.plan
        width = max(NARROWEST, shutil.get_terminal_size().columns - 4)
        rings = {
            "residuals": p.residuals,
            "splits": p.splits,
            "activations": p.inbox_forward,
            "gradients": p.inbox_backward,
            "head's gradients": p.heads,
        }
        told: Rows = [
            ("layers of each part", ", ".join(map(str, self.placement.parts))),
            ("rows held for each part", f"{self.placement.longest}, as many as the longest has layers"),
            ("microbatches", f"{s.microbatches} in {self.facts.ticks} ticks"),
            ("idle", f"{self.idle_share:.1%} of the time, if forward and each half of backward are as long"),
            ("held by each stage", ", ".join(map(str, self.facts.held))),
            ("places of the rings", ", ".join(f"{name} {n}" for name, n in rings.items() if n)),
        ]
        return [("pipeline", told), ("schedule", [(line,) for line in picture.text(s, width).splitlines()])]

    def to_json(self) -> dict[str, Any]:
        """The same as numbers."""
        return {
            "schedule": self.schedule.name,
            "parts": self.placement.parts,
            "microbatches": self.schedule.microbatches,
            "ticks": self.facts.ticks,
            "idle_share": self.idle_share,
            "held": self.facts.held,
            "messages": self.facts.messages,
            "residual_places": self.plan.residuals,
            "split_places": self.plan.splits,
            "operation": self.schedule.operation.tolist(),
            "microbatch": self.schedule.microbatch.tolist(),
            "chunk": self.schedule.chunk.tolist(),
        }

    def draw(self, path: Path) -> None:
        """The picture as a PNG. Raises UserError where it cannot be written."""
        picture.png(self.schedule, path)
