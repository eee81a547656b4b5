"""How fast a run is: FLOPs of a token, peaks of devices, and a clock that counts training alone."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jaxgpt.config import ModelConfig

PEAKS = {
    r"NVIDIA A100.*": 312e12,
    r"NVIDIA H100 80GB HBM3": 989e12,
    r"NVIDIA H200": 989e12,
    r"NVIDIA B200": 2250e12,
}
"""Dense bf16 FLOP/s of one device, as its vendor states, by JAX's name for it."""

FORMULA = "MFU = model FLOPs / (time x peak x devices); FLOPs a token = 6 x matrix weights + causal attention"


def flops_per_token(model: ModelConfig) -> float:
    """Model FLOPs of one token, forward and backward, at the full context: no recomputation, no padding.

    6 for each weight of a matrix that it passes, the head's among them, plus 12 x heads x head width for each key
    that it attends to, in each layer: causal, so (seq + 1) / 2 keys on average, fewer with a window.
    """
    attention = model.width * model.head * 2 * (model.heads + model.kv)
    mlp = (3 if model.gated else 2) * model.width * model.mlp
    weights = model.layers * (attention + mlp) + model.width * model.vocab
    reach = min(model.window or model.seq, model.seq)
    keys = reach * (model.seq - (reach - 1) / 2) / model.seq
    return 6.0 * weights + 12.0 * model.layers * model.heads * model.head * keys


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """FLOP/s of one device for a type of computation, or None where it is not known."""
    if dtype != "bf16":
        return None
    return next((peak for name, peak in PEAKS.items() if re.fullmatch(name, device_kind)), None)


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
