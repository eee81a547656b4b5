"""Parity: what one configuration computes on one device against what it computes on a mesh, array by array."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxgpt.config import RunConfig
from jaxgpt.sharding.mesh import build, parse
from jaxgpt.training.program import Program

OF_ARRAY = 1e-5
"""Largest difference allowed in fp32, as a share of the array's largest value ..."""
OF_MODEL = 1e-7
"""... or of the largest in the model, whichever is more: a key bias has no gradient but rounding."""

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
    """The largest difference of an array against what is allowed."""

    name: str
    found: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether it is within what is allowed; NaN is not."""
        return self.found <= self.allowed


def trace(config: RunConfig, mesh: str, batches: Batches) -> Trace:
    """Trains one step for each global batch from the configuration's own start."""
    sizes = parse(mesh)
    devices = int(np.prod(list(sizes.values())))
    program = Program(config, build(sizes, jax.devices()[:devices]))
    state = program.init()
    losses, norms, gradients = [], [], {}
    for number, batch in enumerate(batches):
        state, metrics = program.step(state, program.place(batch))
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
        if number == 0:
            # Adam's first moment after one step is the gradient times 1 - beta1
            gradients = {name: np.asarray(mu) / (1 - config.beta1) for name, mu in state["mu"].items()}
    params = {name: np.asarray(p) for name, p in state["params"].items()}
    return Trace(np.asarray(jax.device_get(losses)), np.asarray(jax.device_get(norms)), gradients, params)


def differences(one: Trace, other: Trace) -> list[Difference]:
    """Every array of two traces, the worst first."""
    found = [
        Difference("loss", *_worst(one.losses, other.losses, 0.0)),
        Difference("gradient norm", *_worst(one.norms, other.norms, 0.0)),
    ]
    for kind, mine, theirs in (
        ("gradient of", one.gradients, other.gradients),
        ("parameter", one.params, other.params),
    ):
        largest = max(float(np.abs(a).max()) for a in mine.values())
        found += [Difference(f"{kind} {n}", *_worst(mine[n], theirs[n], largest)) for n in mine]
    return sorted(found, key=lambda d: d.found / d.allowed if d.found == d.found else np.inf, reverse=True)


def _worst(one: np.ndarray, other: np.ndarray, largest: float) -> tuple[float, float]:
    allowed = max(OF_ARRAY * float(np.abs(one).max()), OF_MODEL * largest)
    return float(np.abs(one.astype(np.float64) - other).max()), allowed
