"""How reading keeps up with training: what a step waits for its samples, and which source makes it wait."""

from jaxgpt.data import Mixture, Prefetcher
from jaxgpt.data.loader import Batch

SLOW = 0.1
"""Share of a step's time, spent on waiting for samples, from which on a run says so."""


class Reading:
    """Measures the loader's thread between readings."""

    def __init__(self, mixture: Mixture, seq: int, batches: Prefetcher[Batch], step: int) -> None:
        """`step` is done."""
        self._mixture, self._batches = mixture, batches
        self._samples = mixture.samples(seq)
        self._step = step
        self._before = 0.0, [0.0] * len(self._samples)
        self._waited = 0.0
        self._readings = 0
        self._said = False

    def read(self, step: int, position: int) -> dict[str, float]:
        """Milliseconds a step since the last reading, when `step` is done; and what part of its epochs each source is
        through, at a position of the run. Sources are counted from 0 in the order in which --data names them."""
        waited, seconds = self._batches.waited, list(self._mixture.seconds)
        steps = max(step - self._step, 1)
        self._waited = 1e3 * (waited - self._before[0]) / steps
        found = {"data_wait_milliseconds": self._waited}
        taken = self._mixture.taken(position)
        for k, (now, before) in enumerate(zip(seconds, self._before[1], strict=True)):
            found[f"data_read_milliseconds/{k}"] = 1e3 * (now - before) / steps
            found[f"data_epochs/{k}"] = taken[k] / self._samples[k]
        self._step, self._before = step, (waited, seconds)
        self._readings += 1
        return found

    def slow(self, milliseconds: float | int) -> str | None:
        """What to say, once, where steps of so many milliseconds wait for samples; not of the first reading, before
        which nothing could be fetched ahead."""
        if self._said or self._readings < 2 or self._waited < SLOW * milliseconds:
            return None
        self._said = True
        seconds = self._mixture.seconds
        slowest = self._mixture.parts[seconds.index(max(seconds))].data
        return (
            f"data: a step waits {self._waited:.3g} of its {milliseconds:.3g} ms for samples; most of the time goes "
            f"into reading {slowest}"
        )
