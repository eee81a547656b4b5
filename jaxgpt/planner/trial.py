"""The last word of --mesh auto: the plans that are predicted to be fastest, run for some steps on the devices at hand.

    trials = run(found.plans, config, devices, console)

A prediction is off by some percent (experiments/published_rows.py), on devices that share processors by more: plans
that are predicted to be as near as that, a trial alone tells apart. Each is the very train step, compiled, on random
tokens. The program of the plan that wins is kept with all compiled ones, so the run that takes it does not wait again.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxgpt.config import RunConfig
from jaxgpt.errors import UserError
from jaxgpt.planner.plan import Estimate
from jaxgpt.planner.report import choices
from jaxgpt.planner.verify import peak
from jaxgpt.processes import together
from jaxgpt.sharding import mesh
from jaxgpt.training.console import Console, Rows, size
from jaxgpt.training.program import Program

NEAR = 1.25
"""Plans predicted to take up to so many times the shortest predicted step are tried ..."""
MOST = 4
"""... and at most so many."""
STEPS = 5
"""Steps of each that are timed, after one that is not; the shortest counts, for what else a machine does only adds."""


@dataclass(frozen=True)
class Trial:
    """A plan that was run."""

    estimate: Estimate
    seconds: float
    """Of a step: the shortest seen; of several processes, by the one that saw the longest."""

    def row(self) -> tuple[str, ...]:
        """Mesh, choices, predicted and measured time."""
        each = self.estimate
        times = (f"{1e3 * seconds:,.4g} ms" for seconds in (each.step_seconds, self.seconds))
        return (mesh.format_mesh(each.plan.sizes), choices(each), *times)


def run(ranked: Sequence[Estimate], config: RunConfig, devices: list[Any], console: Console) -> list[Trial]:
    """The finalists of a ranking, fastest as measured first; a single one without measuring is [].

    A plan whose compiled step needs more memory than a device has is passed over, and said. Raises UserError where all
    are.
    """
    near = [each for each in ranked if each.step_seconds <= NEAR * ranked[0].step_seconds]
    if len(near) == 1:
        return []
    trials = []
    for trial in _run(near, config, devices, console):
        trials.append(trial)
        if len(trials) == MOST:
            break
    if not trials:
        raise UserError(
            f"--mesh auto: none of the {len(near)} plans predicted to be fastest fits as compiled; "
            "give --recompute full, a smaller --micro-batch, or a --mesh"
        )
    return sorted(trials, key=lambda trial: trial.seconds)


def rows(trials: Sequence[Trial]) -> Rows:
    """As a table."""
    return [("", "", "predicted", "measured"), *(trial.row() for trial in trials)]


def _run(near: Sequence[Estimate], config: RunConfig, devices: list[Any], console: Console) -> Iterator[Trial]:
    for each in near:
        console.say(f"--mesh auto: tries {mesh.format_mesh(each.plan.sizes)}, {choices(each)}")
        program = Program(each.plan.apply(config), mesh.build(each.plan.sizes, devices))
        found = program.compiled.memory_analysis()  # None where a backend tells nothing
        needed = 0 if found is None else peak(found)
        if needed > each.capacity:
            console.fallback(
                f"--mesh auto: {mesh.format_mesh(each.plan.sizes)} is passed over: "
                f"compiled, it needs {size(needed)} of {size(each.capacity)}"
            )
            continue
        seconds = measured(program)
        yield Trial(each, max(together.gathered("trial", seconds)))
        del program
        gc.collect()  # its arrays give way to the next one's


def measured(program: Program) -> float:
    """Seconds of a program's train step on these devices, the shortest of STEPS."""
    state, draw = program.init(), np.random.default_rng(0)
    shape = (program.config.global_batch, program.config.model.seq + 1)
    tokens = draw.integers(0, program.config.model.vocab, shape, dtype=np.int32)
    placed = program.place({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    state, metrics = program.step(state, placed)
    shortest = float("inf")
    for _ in range(STEPS):
        jax.block_until_ready((state, metrics))
        began = time.perf_counter()
        state, metrics = program.step(state, placed)
        jax.block_until_ready((state, metrics))
        shortest = min(shortest, time.perf_counter() - began)
    return shortest
