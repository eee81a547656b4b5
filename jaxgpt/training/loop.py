"""The loop over steps: dispatch, and at chosen steps report, validate, save.

Step N + 1 is dispatched before the metrics of step N are read, and they are read at log steps alone: between those
the host never waits for the devices.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jaxgpt.config import RunConfig, to_json
from jaxgpt.data import Mixture, Prefetcher
from jaxgpt.errors import UserError
from jaxgpt.planner.flops import flops_per_token
from jaxgpt.processes import together
from jaxgpt.training.checkpoint import Writer
from jaxgpt.training.console import Console
from jaxgpt.training.evaluation import Figures, measure
from jaxgpt.training.metrics import Metrics, Unwritten
from jaxgpt.training.profile import Tracer
from jaxgpt.training.program import Program
from jaxgpt.training.reading import Reading
from jaxgpt.training.resume import Tree, flatten, logical_shapes, stored_rows
from jaxgpt.training.signals import StopSignals
from jaxgpt.training.throughput import Pace

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Begin:
    """What a run goes on from."""

    state: Tree
    step: int
    """Steps that the state has behind it."""
    saved: int | None
    """Step of the checkpoint that it came from."""
    samples: int = 0
    """That those steps have read."""


class Loop:
    """One process's share of a run: from a state to the last step, or to a signal. Used in a `with`."""

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        program: Program,
        dataset: Mixture,
        console: Console,
        peak: float | None,
        begin: Begin,
    ) -> None:
        """`peak`: FLOP/s of all devices, for MFU. `begin`: the state to go on from, given up to the loop."""
        self.run, self.config, self.program, self.dataset, self.console = run, config, program, dataset, console
        self.state, self.done, self.saved = begin.state, begin.step, begin.saved
        self._begin = begin.step, begin.samples
        self.stopped: int | None = None
        """The signal that ended the loop."""
        flops = flops_per_token(config.model)
        self._pace = Pace(self.done, config.steps, config.global_batch * config.model.seq, peak, flops)
        self._pending: tuple[int, Tree] | None = None
        self._latest: Tree = {}
        self._reported = self.done

    def __enter__(self) -> "Loop":
        with ExitStack() as stack:
            first = together.is_first()
            self._metrics: Metrics | Unwritten = Metrics(self.run, self.done) if first else Unwritten()
            stack.callback(self._metrics.close)
            self._writer = Writer(self.run / "checkpoints", self.config.keep, together.Barrier())
            stack.callback(self._writer.close)
            traced = self.config.profile_steps() if first else None
            self._tracer = Tracer(traced, self.run / "profile", self.console.say)
            stack.callback(self._tracer.close)
            self._signals = stack.enter_context(StopSignals(self._noted))
            self._stop = together.Stop(lambda: self._signals.received)
            if (peers := together.watched()) is not None:
                peers.noted = self._noted
            self._progress = stack.enter_context(self.console.progress(self.config.steps))
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def train(self) -> None:
        """Runs the steps that are left. Afterwards the last one's state is saved, or being saved."""
        config = self.config
        self._tracer.announce(self.done, config.steps)
        with self._pace.paused():
            self._validate_if_due()
        with Prefetcher(self._fetch, self.done, config.steps) as batches:
            self._reading = Reading(self.dataset, config.model.seq, batches, self.done)
            for batch in batches:
                if self._stop.ends():
                    break
                self._step(batch)
        self._report()
        if self.saved != self.done:
            self._save()
        if self.done < config.steps:
            self.stopped = self._stop.signal

    def validate_all(self) -> Figures | None:
        """Loss over all validation tokens, recorded as the run's own; None where a signal came meanwhile."""
        found = self._validate(complete=True)
        if found is None:
            self.stopped = self._stop.signal
        return found

    def wait(self) -> None:
        """Returns when the last checkpoint is on the disk. Raises UserError where it could not be written."""
        self._writer.wait()

    def _step(self, batch: Batch) -> None:
        step = self.done + 1
        with self._tracer.step(step, self._latest):
            self.state, self._latest = self.program.step(self.state, self.program.place_own(batch))
        self.done = step
        # Of a step before this one: read while this one runs.
        self._report()
        if step % self.config.log_every == 0 or step in (1, self.config.steps):
            self._pending = (step, self._latest)
        self._tracer.after(step, self._latest)
        evaluating, saving = _due(step, self.config.eval_every), _due(step, self.config.save_every)
        if (evaluating or saving) and step < self.config.steps:
            jax.block_until_ready(self._latest)
            self._report()
            with self._pace.paused():
                # Before the checkpoint, so that the records up to a checkpoint are there when it is.
                self._validate_if_due()
                if saving:
                    self._save()

    def _fetch(self, step: int) -> Batch:
        """The samples of the step after `step`: a function of its number alone."""
        config, first = self.config, self._samples(step)
        own = self.program.own_samples
        positions = first + (np.arange(config.global_batch) if own is None else own)
        return self.dataset.batch(config.model.seq, config.seed, positions, config.documents)

    def _samples(self, step: int) -> int:
        """Samples read after a step."""
        begun, samples = self._begin
        return samples + (step - begun) * self.config.global_batch

    def _refuse_what_is_not_finite(self, step: int, values: Mapping[str, float]) -> None:
        """Ends a run that has diverged, before its state takes the place of a checkpoint that is good."""
        wrong = [name for name in ("loss", "grad_norm") if not math.isfinite(values.get(name, 0.0))]
        if wrong:
            kept = "none was saved before" if self.saved is None else f"the checkpoint of step {self.saved} is kept"
            cure = "take a lower --lr, a longer --warmup, or --clip 1"
            raise UserError(f"step {step}: {wrong[0]} is {float(values[wrong[0]])}; {kept}; {cure}")

    def _report(self) -> None:
        if self._pending is None:
            return
        (step, arrays), self._pending = self._pending, None
        values = {name: value.item() for name, value in jax.device_get(arrays).items()}
        self._refuse_what_is_not_finite(step, values)
        self._reported = step
        speed = self._pace.read(step)
        reading = self._reading.read(step, self._samples(step))
        measured = {k: v for k, v in dataclasses.asdict(speed).items() if v is not None}
        self._metrics.write("train", step, **values, **measured, **reading)
        if (slow := self._reading.slow(speed.milliseconds)) is not None:
            self.console.fallback(slow)
        self._progress.step(step, values["loss"], speed)

    def _validate_if_due(self) -> None:
        """A validation in passing, unless it is on record: a signal may have cut it off before the run was resumed."""
        if not _due(self.done, self.config.eval_every) or self.done == self.config.steps:
            return
        found = together.told("records", lambda: [record.get("kind") for record in self._metrics.of(self.done)])
        if "validation" not in found:
            self._validate()

    def _validate(self, complete: bool = False) -> Figures | None:
        limit = None if complete else self.config.eval_tokens
        found = measure(
            self.program,
            self.state["params"],
            self.dataset.validation,
            limit=limit,
            size=self.dataset.validation_bytes,
            stopped=self._stop.ends,
        )
        if found is not None:
            record: dict[str, Any] = {"loss": found.loss, "tokens": found.tokens, "complete": complete}
            if found.bits_per_byte is not None:
                record["bits_per_byte"] = found.bits_per_byte
            self._metrics.write("validation", self.done, **record)
            self.console.say(f"step {self.done}: validation loss {found.loss:.4f} over {found.tokens:,} tokens")
        return found

    def _save(self) -> None:
        if self._reported != self.done:
            self._refuse_what_is_not_finite(self.done, {n: float(a) for n, a in jax.device_get(self._latest).items()})
        self._metrics.sync()
        meta = {
            "samples": self._samples(self.done),
            "data": self.dataset.fingerprint,
            "config": json.loads(to_json(self.config)),
        }
        shapes = logical_shapes(self.state, self.program.logical)
        rows = stored_rows(self.state, self.program.rows)
        self._writer.save(self.done, flatten(self.state), shapes, meta, rows)
        self.saved = self.done

    def _noted(self, name: str) -> None:
        if (peers := together.watched()) is not None and (received := self._signals.received) is not None:
            peers.stop(received)
        self.console.say(f"{name}: the step that runs is finished and saved; the same again ends at once")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
