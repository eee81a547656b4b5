"""Metrics of a run: one JSON object a line, TensorBoard's event files beside it, both cut at the step resumed from.

A training record:   {"kind": "train", "step": 10, "loss": 5.1, "grad_norm": 0.9, "lr": 1e-4, ...}
A validation record: {"kind": "validation", "step": 100, "loss": 3.2, "tokens": 65536, "complete": false}
A step that went wrong: {"kind": "fault", "step": 7, "action": "skip", "name": "blocks.mlp.up.weight", "layer": 3, ...}
Loss is in nats a token. What is not finite is null.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from jaxgpt.errors import UserError

FLUSH_SECONDS = 10.0
"""Longest that a TensorBoard event waits for the disk."""

Record = dict[str, Any]
Value = float | int | bool | str | list[int]


class Unwritten:
    """The metrics of a process that does not write them."""

    def write(self, kind: str, step: int, **values: float | int | bool) -> None:
        """Nothing."""

    def of(self, step: int) -> list[Record]:
        """Nothing."""
        return []

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Metrics:
    """Appends records to `metrics.jsonl` and `tensorboard/` in a run folder. Raises UserError where it cannot."""

    def __init__(self, run: Path, last: int) -> None:
        """Goes on after step `last`: later records, of steps that are trained again, are dropped."""
        self.file = run / "metrics.jsonl"
        events = run / "tensorboard"
        try:
            _drop_after(self.file, last)
            events.mkdir(exist_ok=True)
            # Not tensorboardX's SummaryWriter: its thread would swallow a full disk. The time in nanoseconds, since
            # the name's own has seconds, and two starts within one would share a file.
            self._events = EventsWriter(str(events / "events"), f".{time.time_ns()}")
            # TensorBoard forgets what earlier files say of later steps.
            self._events.write_event(Event(step=last + 1, session_log=SessionLog(status=SessionLog.START)))
            self._lines = self.file.open("a", encoding="utf-8")
        except OSError as error:
            raise _unwritable(self.file, error) from None
        self._flushed = time.monotonic()

    def write(self, kind: str, step: int, **values: Value) -> None:
        """Appends a record. It outlives the process from here on. Numbers go to TensorBoard, too."""
        record = {"kind": kind, "step": step} | {name: _finite(value) for name, value in values.items()}
        try:
            self._lines.write(json.dumps(record) + "\n")
            self._lines.flush()
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    summary = scalar(f"{kind}/{name}", float(value))
                    self._events.write_event(Event(step=step, wall_time=time.time(), summary=summary))
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._events.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            raise _unwritable(self.file, error) from None

    def of(self, step: int) -> list[Record]:
        """The records of a step."""
        return [record for record in read(self.file.parent) if record["step"] == step]

    def sync(self) -> None:
        """Everything is on the disk when this returns: what a checkpoint relies on."""
        try:
            os.fsync(self._lines.fileno())
            self._events.flush()
        except OSError as error:
            raise _unwritable(self.file, error) from None

    def close(self) -> None:
        """Ends both files."""
        try:
            try:
                self._events.close()
            finally:
                self._lines.close()
        except OSError as error:
            raise _unwritable(self.file, error) from None


def read(run: Path) -> list[Record]:
    """The records of a run, in order; what is null is not a number. A line cut off by a kill is left out."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    records = (_parse(line) for line in file.read_bytes().splitlines())
    return [record for record in records if record is not None]


def _drop_after(file: Path, last: int) -> None:
    if not file.exists():
        return
    lines = file.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _step(line) <= last]
    if kept == lines:
        return
    rewritten = file.with_suffix(".rewritten")
    with rewritten.open("wb") as out:
        out.writelines(kept)
        out.flush()
        os.fsync(out.fileno())
    rewritten.replace(file)


def _step(line: bytes) -> int:
    """The record's step. A line that is no record is not ours to drop: it counts as before all steps."""
    record = _parse(line)
    return -1 if record is None else record["step"]


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {name: math.nan if value is None else value for name, value in record.items()}


def _finite(value: Value) -> Value | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _unwritable(file: Path, error: OSError) -> UserError:
    return UserError(
        f"{file}: cannot be written ({error.strerror or error}); checkpoints are untouched; "
        "make room or mend the disk, then give the same command to go on from the last one"
    )
