"""What becomes of a run when a step goes wrong: what is said and written of it, and whether the run goes on.

A step whose loss or gradient is not finite is undone on the devices, inside of the program (training.step), and so are
those after it until the host has read of it, at the next log step. The run then goes on from the bad step, as if those
had not been run. What a step is a function of: its samples of its number; learning rate, dropout and Adam's correction
of the number of updates that were made, which a step that is left out does not raise.

RUN/faults/step-N.json says what is known of the bad step N, and a record of kind "fault" in metrics.jsonl the same.
"""

import json
import statistics
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jaxgpt.config import RunConfig
from jaxgpt.errors import UserError
from jaxgpt.training import folder
from jaxgpt.training.blame import Culprit
from jaxgpt.training.metrics import Metrics, Record, Unwritten

FOLDER = "faults"
READINGS = 16
"""Losses, one of each log step, whose median a spike is held against."""
FEWEST = 8
"""Readings before which none is called a spike."""
SPIKES = 3
"""Most rewinds from one checkpoint because of spikes."""
CURE = "take a lower --lr, a longer --warmup, or --clip 1"

Decision = Literal["skip", "stop", "rewind"]


@dataclass(frozen=True)
class Rewind:
    """Back to the last checkpoint, and on with the samples that come after those of the step that went wrong."""

    step: int
    """That step."""
    samples: int
    """Those to go on after."""
    most: int
    """Rewinds allowed from one checkpoint."""
    why: str


class Spikes:
    """Tells a loss that is far above those before it."""

    def __init__(self, factor: float, records: list[Record]) -> None:
        """factor: times the median; 0: nothing is a spike. records: of the run so far, so that one that is resumed
        finds what the one that was never stopped does."""
        self._factor = factor
        losses = [record["loss"] for record in records if record.get("kind") == "train"]
        self._losses: deque[float] = deque(losses, maxlen=READINGS)

    def above(self, loss: float) -> float | None:
        """The median that the loss is so far above; None where it is no spike, and counts among the readings."""
        if self._factor and len(self._losses) >= FEWEST:
            median = statistics.median(self._losses)
            if loss > self._factor * median:
                return median
        self._losses.append(loss)
        return None


def left_out(records: list[Record], done: int) -> int:
    """How many steps in a row, up to a step that is done, were left out."""
    steps = {record["step"] for record in records if record.get("kind") == "fault" and record.get("action") == "skip"}
    count = 0
    while done - count in steps:
        count += 1
    return count


def decide(config: RunConfig, skipped: int) -> Decision:
    """What is to be done about a step that is not finite, before which so many in a row were left out."""
    what, times = config.after_non_finite()
    return "stop" if what == "skip" and skipped >= times else what


def record(run: Path, metrics: Metrics | Unwritten, step: int, first: int, culprit: Culprit, action: Decision) -> Path:
    """Writes down what is known of a step that is not finite, whose samples begin at `first` of the run's. Returns the
    file. Of several processes one alone is to do it. Raises UserError where it cannot be written."""
    known: dict[str, Any] = asdict(culprit) | {
        "action": action,
        "samples": list(culprit.samples),
        "positions": [first + sample for sample in culprit.samples],
    }
    known = {name: value for name, value in known.items() if value is not None}
    where, content = run / FOLDER, (json.dumps({"step": step} | known, indent=1) + "\n").encode()
    try:
        where.mkdir(exist_ok=True)
        file = _free(where, f"step-{step}", content)
        folder.replace(file, content)
    except OSError as error:
        raise UserError(f"{where}: cannot be written ({error.strerror or error}); mend that") from None
    metrics.write("fault", step, **known)
    return file


def line(step: int, culprit: Culprit, decision: Decision, skipped: int, config: RunConfig, file: Path) -> str:
    """One line for the console: what was wrong with the step, and what is done about it."""
    most = config.after_non_finite()[1]
    does = {
        "skip": f"it is undone and left out, {skipped + 1} in a row of at most {most}",
        "rewind": "it is undone",
        "stop": "it is undone",
    }[decision]
    return f"step {step}: loss or gradient is not finite, {culprit.said()}; {does}; see {file}"


def end(step: int, culprit: Culprit, saved: int | None, file: Path) -> UserError:
    """What ends a run at a step that is not finite. saved: the last checkpoint's step."""
    kept = "no checkpoint was saved before" if saved is None else f"the checkpoint of step {saved} is kept"
    on = f"{CURE}, or go on past it with a larger N in --non-finite skip:N"
    return UserError(f"step {step}: loss or gradient is not finite, {culprit.said()}; {kept}; {on}; see {file}")


def _free(where: Path, name: str, content: bytes) -> Path:
    """A file that is not there, or has this content: a step may go wrong twice, with other samples."""
    file, number = where / f"{name}.json", 1
    while file.exists() and file.read_bytes() != content:
        number += 1
        file = where / f"{name}-{number}.json"
    return file
