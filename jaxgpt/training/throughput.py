"""How fast a run is: FLOPs of a token, peaks of devices, and a clock that counts training alone."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jaxgpt.planner.hardware import table

FORMULA = "MFU = model FLOPs / (time x peak x devices); FLOPs a token = 6 x matrix weights + causal attention"


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """FLOP/s of one device for a type of computation, or None where it is not known."""
    if dtype != "bf16" or device_kind == "cpu":  # a CPU's peak is measured, not stated
        return None
    return next((each.peak("bf16") for each in table().values() if re.fullmatch(each.kind, device_kind)), None)


@dataclass(frozen=True)
class Speed:
    """Of the steps since the last reading."""

    milliseconds: float | int
    """A step."""
    tokens_per_second: float | int
    """All devices together."""
    mfu: float | None
    """Of 1; None where no peak is known."""
    seconds_left: float | int


class Pace:
    """Measures steps; what is not training (validation, saving) is left out by `paused`."""

    def __init__(self, step: int, steps: int, tokens_a_step: int, flops_a_second: float | None, flops: float) -> None:
        """`step` is done, `steps` is the last. `flops_a_second`: peak of all devices. `flops`: a token's."""
        self._step, self._steps = step, steps
        self._tokens, self._peak, self._flops = tokens_a_step, flops_a_second, flops
        self._since = time.monotonic()

    def read(self, step: int) -> Speed:
        """Speed of the steps since the last reading, when `step` is done."""
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9) / (step - self._step)
        self._since, self._step = now, step
        rate = self._tokens / seconds
        mfu = None if self._peak is None else rate * self._flops / self._peak
        return Speed(1e3 * seconds, rate, mfu, seconds * (self._steps - step))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here does not count. Nothing may be running on the devices when it begins."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - began
