"""What a run has read: phases, each with its global batch and blend, so that either may change when it is resumed.

RUN/samples.json holds them. A phase says at which step and sample it begins, and how many samples had been taken of
each source by then; so a run goes on with the samples that come next, however it read the ones before.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxgpt.config import RunConfig
from jaxgpt.data import Mixture, blend
from jaxgpt.errors import UserError
from jaxgpt.training import folder

FILE = "samples.json"
Shares = Sequence[tuple[str, int]]
"""Fingerprint and weight of each source of a blend."""


@dataclass(frozen=True)
class Phase:
    """Steps that read alike."""

    step: int
    """Steps before it."""
    sample: int
    """Samples before it."""
    global_batch: int
    data: str
    shares: tuple[tuple[str, int], ...]
    taken: dict[str, int]
    """Samples before it of each source, by fingerprint."""
    rewinds: int = 0
    """How often the run has come back to this step, to leave samples out."""

    def samples(self, step: int) -> int:
        """Samples that the run has read after a step of this phase."""
        return self.sample + (step - self.step) * self.global_batch

    def after(self, step: int, config: RunConfig, shares: Shares, sample: int | None = None) -> "Phase":
        """The phase that follows this one when so many steps are done. sample: the samples before it, where some are
        left out."""
        sample = self.samples(step) if sample is None else sample
        counts = blend.counts([weight for _, weight in self.shares], sample - self.sample)
        taken = dict(self.taken)
        for (source, _), count in zip(self.shares, counts, strict=True):
            taken[source] = taken.get(source, 0) + count
        rewinds = self.rewinds if self.step == step else 0
        return Phase(step, sample, config.global_batch, config.data, tuple(shares), taken, rewinds)


def shares(mixture: Mixture) -> tuple[tuple[str, int], ...]:
    """What a phase keeps of a blend."""
    return tuple((found.fingerprint, part.weight) for part, found in zip(mixture.parts, mixture.datasets, strict=True))


def first(run: Path, config: RunConfig, sources: Shares) -> None:
    """Writes down how a run begins, unless it is known. To be done before its configuration is written anew."""
    if not (run / FILE).exists():
        _write(run, [Phase(0, 0, config.global_batch, config.data, tuple(sources), {})])


def resume(
    run: Path, config: RunConfig, mixture: Mixture, step: int, say: Callable[[str], None]
) -> tuple[int, Mixture]:
    """(samples read after `step`, the blend from there on). What has changed is said and written down."""
    phases = [phase for phase in _read(run) if phase.step <= step]
    last, now = phases[-1], shares(mixture)
    if (last.global_batch, sorted(last.shares)) != (config.global_batch, sorted(now)):
        following = last.after(step, config, now)
        for name, before, after in (
            ("global batch", last.global_batch, config.global_batch),
            ("blend", last.data, config.data),
        ):
            if before != after:
                say(f"{name}: {before} -> {after}; goes on after the {following.sample:,} samples read so far")
        phases = [*(phase for phase in phases if phase.step < step), following]
        _write(run, phases)
    return phases[-1].samples(step), mixture.beginning(phases[-1].sample, phases[-1].taken)


def rewind(run: Path, config: RunConfig, mixture: Mixture, step: int, sample: int) -> None:
    """Writes down that the run, come back to `step`, goes on after so many samples; those between are left out."""
    phases = [phase for phase in _read(run) if phase.step <= step]
    following = phases[-1].after(step, config, shares(mixture), sample)
    _write(run, [*(p for p in phases if p.step < step), replace(following, rewinds=following.rewinds + 1)])


def rewinds(run: Path, step: int) -> int:
    """How often a run has come back to a step."""
    return max((phase.rewinds for phase in _read(run) if phase.step == step), default=0)


def _write(run: Path, phases: list[Phase]) -> None:
    try:
        folder.replace(run / FILE, json.dumps([asdict(phase) for phase in phases], indent=1).encode())
    except OSError as error:
        raise UserError(f"{run / FILE}: cannot be written ({error.strerror or error}); mend that") from None


def _read(run: Path) -> list[Phase]:
    try:
        found = json.loads((run / FILE).read_bytes())
        phases = [Phase(**{**one, "shares": tuple((name, weight) for name, weight in one["shares"])}) for one in found]
        if not phases or phases[0].step:
            raise ValueError("it does not begin at step 0")
        return phases
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run / FILE}: is damaged ({error}); restore it") from None
