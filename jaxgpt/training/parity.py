"""Parity: what one configuration computes on one device against what it computes on a mesh, array by array."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import jax
import numpy as np

from jaxgpt.config import RunConfig
from jaxgpt.sharding.hosts import whole
from jaxgpt.sharding.mesh import build, devices_named, parse, take
from jaxgpt.training.program import Program
from jaxgpt.training.step import State

OF_ARRAY = 1e-5
"""Largest difference allowed in fp32, as a share of the array's largest value ..."""
OF_MODEL = 1e-7
"""... or of the largest in the model, whichever is more: a key bias has no gradient but rounding."""

ROUNDINGS = 2.0
"""Difference allowed in bf16, in roundings: root mean squares of what one device's bf16 differs by from its fp32. Two
results that each lie within one rounding of the exact one lie within two of each other."""

Batches = Sequence[dict[str, np.ndarray]]


@dataclass(frozen=True)
class Trace:
    """What a few steps computed."""

    losses: np.ndarray
    norms: np.ndarray
    gradients: dict[str, np.ndarray]
    """Of the first step, after clipping."""
    params: dict[str, np.ndarray]
    """After the last step."""


@dataclass(frozen=True)
class Difference:
    """How far an array is from the same one on one device, against what is allowed."""

    name: str
    found: float
    allowed: float
    at: tuple[int, ...] = ()
    """Index of the element that differs most."""

    @property
    def share(self) -> float:
        """found as a share of what is allowed; infinite where it is not a number."""
        if self.found == 0:
            return 0.0
        return self.found / self.allowed if self.allowed > 0 and np.isfinite(self.found) else np.inf

    @property
    def holds(self) -> bool:
        """Whether it is within what is allowed; NaN is not."""
        return self.share <= 1


def program(config: RunConfig, mesh: str) -> Program:
    """The configuration's programs on a mesh that names every size, over the first devices there are."""
    wanted = devices_named(mesh)
    # Of several processes each computes for itself what one device does.
    there = jax.local_devices() if wanted == 1 else jax.devices()
    return Program(config, build(parse(mesh), take(there, wanted)[0]))


def trace(config: RunConfig, mesh: str, batches: Batches) -> Trace:
    """Trains one step for each global batch from the configuration's own start."""
    return steps(program(config, mesh), batches)


def whole_products(program: Program) -> AbstractContextManager[None]:
    """Within it, an fp32 program is compiled with fp32 products: a GPU that shortened them to TF32 would differ by more
    than what is looked for."""
    return jax.default_matmul_precision("highest") if program.dtype == "fp32" else nullcontext()


def steps(program: Program, batches: Batches, state: State | None = None) -> Trace:
    """What a program computes in one step for each global batch. state: what it begins with, which is given up; None:
    its own start."""
    losses, norms, gradients = [], [], {}
    with whole_products(program):
        state = program.init() if state is None else state
        for number, batch in enumerate(batches):
            state, metrics = program.step(state, program.place(batch))
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
            if number == 0:
                # Adam's first moment after one step is the gradient times 1 - beta1
                share = 1 - program.config.beta1
                gradients = {n: program.in_order(n, whole(mu)) / share for n, mu in state["mu"].items()}
    params = {name: program.in_order(name, whole(p)) for name, p in state["params"].items()}
    return Trace(np.asarray(losses), np.asarray(norms), gradients, params)


def differences(one: Trace, other: Trace) -> list[Difference]:
    """The largest difference in every array of two fp32 traces, the worst first."""
    found = []
    for name, (mine, theirs), largest in _arrays(one, other):
        allowed = max(OF_ARRAY * _largest(mine), OF_MODEL * largest)
        apart = np.abs(theirs.astype(np.float64) - mine)
        found.append(Difference(name, float(apart.max()), allowed, _index(apart)))
    return sorted(found, key=lambda d: d.share, reverse=True)


def roundings(exact: Trace, one: Trace, other: Trace) -> list[Difference]:
    """The root mean square difference of every array of two bf16 traces, the worst first. exact: one's, in fp32.

    Allowed is what ROUNDINGS says, and never less than in fp32.
    """
    found = []
    for name, (fp32, mine, theirs), largest in _arrays(exact, one, other):
        apart, rounding = theirs.astype(np.float64) - mine, mine.astype(np.float64) - fp32
        allowed = max(ROUNDINGS * _rms(rounding), OF_ARRAY * _largest(fp32), OF_MODEL * largest)
        found.append(Difference(name, _rms(apart), allowed, _index(np.abs(apart))))
    return sorted(found, key=lambda d: d.share, reverse=True)


def _arrays(*traces: Trace) -> Iterator[tuple[str, list[np.ndarray], float]]:
    """Name of each array, what it is in every trace, and the largest value of the first trace's arrays of its kind."""
    yield "loss", [t.losses for t in traces], 0.0
    yield "gradient norm", [t.norms for t in traces], 0.0
    for kind, arrays in (
        ("gradient of", [t.gradients for t in traces]),
        ("parameter", [t.params for t in traces]),
    ):
        largest = max(_largest(a) for a in arrays[0].values())
        for name in arrays[0]:
            yield f"{kind} {name}", [each[name] for each in arrays], largest


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max())


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array))))


def _index(apart: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(apart)), apart.shape))
