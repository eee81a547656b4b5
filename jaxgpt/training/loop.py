"""The loop over steps: dispatch, and at chosen steps report, validate, save.

Step N + 1 is dispatched before the metrics of step N are read, and they are read at log steps alone: between those
the host never waits for the devices. What a step that goes wrong leads to is decided in training.faults.
"""

import dataclasses
import json
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jaxgpt.config import RunConfig
from jaxgpt.config_file import to_json
from jaxgpt.data import Mixture, Prefetcher
from jaxgpt.planner.flops import flops_per_token
from jaxgpt.processes import together
from jaxgpt.sharding.ledger import ledger
from jaxgpt.training import faults, metrics
from jaxgpt.training.blame import find
from jaxgpt.training.checkpoint import Writer
from jaxgpt.training.console import Console
from jaxgpt.training.evaluation import Figures, measure
from jaxgpt.training.metrics import Metrics, Unwritten
from jaxgpt.training.profile import Tracer
from jaxgpt.training.program import Program
from jaxgpt.training.reading import Reading
from jaxgpt.training.resume import Tree, flatten, logical_shapes, stored_rows
from jaxgpt.training.signals import StopSignals, in_notebook
from jaxgpt.training.throughput import Pace
from jaxgpt.training.watchdog import Watchdog

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
        self.rewind: faults.Rewind | None = None
        """What the loop ended for, and is to be done before another goes on."""
        flops = flops_per_token(config.model)
        self._pace = Pace(self.done, config.steps, config.global_batch * config.model.seq, peak, flops)
        self._pending: tuple[int, Tree] | None = None
        self._latest: Tree = {}
        self._reported = self.done
        self._in_passing: tuple[int, float] | None = None
        """Step and loss of the last validation in passing."""

    def __enter__(self) -> "Loop":
        with ExitStack() as stack:
            first = together.is_first()
            self._metrics: Metrics | Unwritten = Metrics(self.run, self.done) if first else Unwritten()
            stack.callback(self._metrics.close)
            records = self._records()
            self._left_out, self._left_out_until = faults.left_out(records, self.done), self.done
            self._spikes = faults.Spikes(self.config.spike, records)
            factor = 0.0 if in_notebook() else self.config.watchdog
            self.watchdog = stack.enter_context(Watchdog(self.run, factor, self.config.log_every, self._collectives))
            self._writer = Writer(self.run / "checkpoints", self.config.keep, self.config.keep_every)
            stack.callback(self._writer.close)
            traced = self.config.profile_steps() if first else None
            self._tracer = Tracer(traced, self.run / "profile", self.console.say)
            stack.callback(self._tracer.close)
            self._signals = stack.enter_context(StopSignals(self._noted))
            self._stop = together.Stop(lambda: self._signals.received)
            if (peers := together.watched()) is not None:
                peers.noted, peers.last_words = self._noted, self.watchdog.write_down
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
        stops = False
        while self.done < config.steps and not stops and self.rewind is None:
            self._advance()
            stops = self._stop.ends()  # not what this process has heard: all leave the loop at the same step
        if self.rewind is None and self.saved != self.done:
            self._validate_if_due()
            self._save()
        if stops and self.done < config.steps:
            self.stopped = self._stop.signal

    def _records(self) -> list[metrics.Record]:
        """What the run has on record up to here, the same for all processes."""
        together.wait("records are cut")
        found = metrics.read(self.run)
        together.wait("records are read")
        return found

    def _advance(self) -> None:
        """Steps until the last one, a signal, or one that went wrong: `done` then says from where to go on."""
        config = self.config
        self.watchdog.began(self.done)
        with Prefetcher(self._fetch, self.done, config.steps) as batches:
            self._reading = Reading(self.dataset, config.model.seq, batches, self.done)
            for batch in self.watchdog.each("read batch", batches):
                if self._stop.ends():
                    break
                if not self._step(batch):
                    return
        self._settled()

    def validate_all(self) -> Figures | None:
        """Loss over all validation tokens, recorded as the run's own; None where a signal came meanwhile."""
        found = self._validate(complete=True)
        if found is None:
            self.stopped = self._stop.signal
        return found

    def wait(self) -> None:
        """Returns when the last checkpoint is on the disk. Raises UserError where it could not be written."""
        with self.watchdog.phase("save"):
            self._writer.wait()

    def _step(self, batch: Batch) -> bool:
        """One step; False where it, or one before it, went wrong."""
        step = self.done + 1
        placed = self.program.place_own(batch)
        if "undone" in self._latest:
            placed["undone"] = self._latest["undone"]
        compiles = self.watchdog.phase("compile") if step == self._begin[0] + 1 else nullcontext()
        with self._tracer.step(step, self._latest), compiles:
            self.state, self._latest = self.program.step(self.state, placed)
        self.done = step
        # Of a step before this one: read while this one runs.
        if not self._report():
            return False
        if step % self.config.log_every == 0 or step in (1, self.config.steps):
            self._pending = (step, self._latest)
        self._tracer.after(step, self._latest)
        evaluating, saving = _due(step, self.config.eval_every), _due(step, self.config.save_every)
        if (evaluating or saving) and step < self.config.steps:
            jax.block_until_ready(self._latest)
            if not self._settled():
                return False
            with self._pace.paused():
                # Before the checkpoint, so that the records up to a checkpoint are there when it is.
                self._validate_if_due()
                if saving:
                    self._save()
        return True

    def _fetch(self, step: int, whole: bool = False) -> Batch:
        """The samples of the step after `step`, a function of its number alone: this process's own, or all."""
        config, first = self.config, self._samples(step)
        own = None if whole else self.program.own_samples
        positions = first + (np.arange(config.global_batch) if own is None else own)
        return self.dataset.batch(config.model.seq, config.seed, positions, config.documents)

    def _samples(self, step: int) -> int:
        """Samples read after a step."""
        begun, samples = self._begin
        return samples + (step - begun) * self.config.global_batch

    def _report(self) -> bool:
        """Tells of the step that is pending; False where it, or one before it, went wrong."""
        if self._pending is None:
            return True
        (step, arrays), self._pending = self._pending, None
        values = {name: value.item() for name, value in jax.device_get(arrays).items()}
        undone = values.pop("undone")
        if undone:
            return self._not_finite(step - undone + 1)
        self.watchdog.stepped(step)
        self._reported = step
        if (median := self._spikes.above(values["loss"])) is not None:
            why = f"step {step}: loss {values['loss']:.4f} is over {self.config.spike:g} times the median, {median:.4f}"
            return self._set_back(faults.Rewind(step, self._samples(step), faults.SPIKES, why))
        speed = self._pace.read(step)
        reading = self._reading.read(step, self._samples(step))
        measured = {k: v for k, v in dataclasses.asdict(speed).items() if v is not None}
        self._metrics.write("train", step, **values, **measured, **reading)
        if (slow := self._reading.slow(speed.milliseconds)) is not None:
            self.console.fallback(slow)
        self._progress.step(step, values["loss"], speed)
        return True

    def _settled(self) -> bool:
        """Waits for the steps that run; False where one went wrong. Else the state is that after `done`."""
        if not self._report():
            return False
        if self._reported == self.done or not self._latest:
            return True
        undone = int(jax.device_get(self._latest["undone"]))
        return not undone or self._not_finite(self.done - undone + 1)

    def _not_finite(self, step: int) -> bool:
        """Loss or gradient of a step were not finite, and the state is the one before it: names what was wrong, and
        leaves the step out, goes back, or ends the run with a UserError. False."""
        if step - 1 != self._left_out_until:
            self._left_out = 0
        self._latest = {}
        with self._pace.paused(), self.watchdog.phase("find what is not finite"):
            updates = int(jax.device_get(self.state["step"]))
            culprit = find(self.program, self.state["params"], self._fetch(step - 1, whole=True), updates)
        decision = faults.decide(self.config, self._left_out)
        first = self._samples(step - 1)
        record = partial(faults.record, self.run, self._metrics, step, first, culprit, decision)
        file = Path(together.told("a fault's file", lambda: str(record())))
        self.done = step - 1
        if decision == "stop":
            if culprit.whole and self.saved != self.done:
                self._save()
                self.wait()
            raise faults.end(step, culprit, self.saved, file)
        said = faults.line(step, culprit, decision, self._left_out, self.config, file)
        if decision == "rewind":
            most = self.config.after_non_finite()[1]
            return self._set_back(faults.Rewind(step, self._samples(step), most, said))
        self.console.fallback(said)
        self._left_out, self._left_out_until, self.done = self._left_out + 1, step, step
        return False

    def _set_back(self, rewind: faults.Rewind) -> bool:
        """Ends the loop, so that the run goes on from its last checkpoint. False."""
        self.console.fallback(rewind.why)
        self.rewind, self._pending, self._latest = rewind, None, {}
        self.done = self.saved or 0
        return False

    def _collectives(self) -> list[str]:
        """A line for each of a step's."""
        lines = ledger(self.program.traced.jaxpr, self.program.sizes)
        return [f"{one.times} x {one.kind} over {', '.join(one.axes)}, {one.phase}, {one.source}" for one in lines]

    def _validate_if_due(self) -> None:
        """A validation in passing, unless it is on record: a signal may have cut it off before the run was resumed."""
        if not _due(self.done, self.config.eval_every):
            return
        found = together.told("records", lambda: [record.get("kind") for record in self._metrics.of(self.done)])
        if "validation" not in found:
            self._validate()

    def _validate(self, complete: bool = False) -> Figures | None:
        with self.watchdog.phase("validate"):
            return self._measured(complete)

    def _measured(self, complete: bool) -> Figures | None:
        def stopped() -> bool:
            self.watchdog.beat()
            return self._stop.ends()

        limit = None if complete else self.config.eval_tokens
        found = measure(
            self.program,
            self.state["params"],
            self.dataset.validation,
            self.dataset.validation_documents,
            limit=limit,
            size=self.dataset.validation_bytes,
            stopped=stopped,
        )
        if found is not None:
            if not complete:  # of as many tokens each time, so that checkpoints compare
                self._in_passing = self.done, found.loss
            record: dict[str, Any] = {"loss": found.loss, "tokens": found.tokens, "complete": complete}
            if found.bits_per_byte is not None:
                record["bits_per_byte"] = found.bits_per_byte
            self._metrics.write("validation", self.done, **record)
            self.console.say(f"step {self.done}: validation loss {found.loss:.4f} over {found.tokens:,} tokens")
        return found

    def _save(self) -> None:
        with self.watchdog.phase("save"):
            self._save_now()

    def _save_now(self) -> None:
        self._metrics.sync()
        meta = {
            "samples": self._samples(self.done),
            "data": self.dataset.fingerprint,
            "config": json.loads(to_json(self.config)),
        }
        shapes = logical_shapes(self.state, self.program.logical)
        rows = stored_rows(self.state, self.program.rows)
        step, loss = self._in_passing or (None, None)
        if self._writer.busy:
            self.console.fallback(
                f"step {self.done}: waits for the checkpoint of step {self.saved}, which is still being written; "
                "a larger --save-every lets the disk keep up"
            )
        self._writer.save(self.done, flatten(self.state), shapes, meta, rows, loss if step == self.done else None)
        self.saved = self.done

    def _noted(self, name: str) -> None:
        if (peers := together.watched()) is not None and (received := self._signals.received) is not None:
            peers.stop(received)
        self.console.say(f"{name}: the step that runs is finished and saved; a second signal ends at once")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
