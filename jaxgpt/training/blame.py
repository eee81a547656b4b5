"""Which tensor was the first that is not finite, and of which samples: a bad step's batch, run again.

The step has been undone, so the parameters are those that it met. Looked at in the order of a step: parameters;
activations, block by block, forward and without dropout; the loss; gradients, from the head backwards; their norm.
It works on every mesh: each question is one program, and its answer is the same on every process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.model.taps import SITES, as_far_as
from jaxgpt.processes import together
from jaxgpt.sharding.layout import split_axes
from jaxgpt.sharding.named import relayout
from jaxgpt.training.microbatch import BLOCKS
from jaxgpt.training.program import Program
from jaxgpt.training.step import Arrays, Step, on_mesh, state_specs

MOST = 8
"""Samples named at most."""
ORDER = ("norm1", "attention", "norm2", "mlp")
"""In which the parts of a block act."""

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Culprit:
    """The first tensor of a step that is not finite."""

    what: str
    """parameter, activation, loss, gradient, norm; or nothing, where a second run of the step finds all finite."""
    name: str
    """Of the parameter or activation, "blocks.mlp.up.weight"."""
    layer: int | None
    """Counted from 0; None of what is in no block."""
    microbatch: int | None
    """The first that has it; None where no single sample does."""
    samples: tuple[int, ...]
    """In the global batch, counted from 0: of that microbatch, MOST at most."""

    @property
    def whole(self) -> bool:
        """Whether the parameters are finite: worth to be saved."""
        return self.what != "parameter"

    def said(self) -> str:
        """For a line on the console."""
        if self.what == "nothing":
            return "run again, the step is finite: a device may have miscomputed"
        of = "" if self.layer is None else f" of layer {self.layer}"
        tensor = self.name if self.what in ("loss", "norm") else f"{self.what} {self.name}{of}"
        if self.microbatch is None:
            return f"first in {tensor}, of no sample alone"
        samples = ", ".join(map(str, self.samples))
        return f"first in {tensor}, microbatch {self.microbatch}, samples {samples} of its batch"


def find(program: Program, params: Arrays, batch: Batch, updates: int) -> Culprit:
    """The culprit of a step with these parameters, before which the optimizer has made so many updates.

    batch: the global batch, {"inputs", "targets"} [global_batch, seq]; where documents are separate, also {"starts"}.
    """
    return _Search(program, params, batch, np.int32(updates)).culprit()


@dataclass(frozen=True)
class _Search:
    program: Program
    params: Arrays
    batch: Batch
    updates: np.int32

    def culprit(self) -> Culprit:
        loss, norm, gradients, held = self.examined(range(len(self.batch["inputs"])))
        samples = self.streams()
        if wrong := _first(self.program, held):
            return self.named("parameter", *wrong, samples)
        if samples:
            return self.named("activation", *self.site(samples[0] // self.rows), samples)
        if not np.isfinite(loss):
            return self.named("loss", "the loss", None, self.losses())
        if wrong := _first(self.program, gradients, backwards=True):
            return self.named("gradient", *wrong, self.guilty())
        if not np.isfinite(norm):
            return Culprit("norm", "the gradient's norm, a sum of squares too large for fp32", None, None, ())
        return Culprit("nothing", "", None, None, ())

    def named(self, what: str, name: str, layer: int | None, samples: Sequence[int]) -> Culprit:
        """With the samples of the first microbatch alone."""
        if not samples:
            return Culprit(what, name, layer, None, ())
        first = samples[0] // self.rows
        mine = tuple(s for s in samples if s // self.rows == first)
        return Culprit(what, name, layer, first, mine[:MOST])

    @property
    def rows(self) -> int:
        """Samples of a microbatch."""
        return self.program.micro_batch

    # The questions

    def examined(self, samples: Sequence[int]) -> tuple[Any, Any, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Loss, norm, and for each parameter how many entries of its gradient and of itself are not finite (of a
        block's, row by row), in a step whose batch is filled with these samples."""
        rows = np.resize(np.asarray(samples), len(self.batch["inputs"]))
        placed = self.program.place({n: a[rows] for n, a in self.batch.items()})
        found: tuple[Any, Any, dict[str, np.ndarray], dict[str, np.ndarray]] = jax.device_get(
            _examine(self.program)(self.params, placed, self.updates)
        )
        return found

    def probed(self, microbatch: int, layer: int, site: str) -> np.ndarray:
        """Of each sample of a microbatch, how many entries of an activation are not finite; layer -1: the embedding."""
        first = microbatch * self.rows
        mine = slice(first, first + self.rows)
        placed = {name: self.program.place_tokens(self.batch[name][mine]) for name in _read(self.program)}
        asked = np.int32(layer), np.int32(SITES.index(site))
        found: np.ndarray = jax.device_get(_probe(self.program)(self.params, placed, *asked))
        return found

    # The answers

    def streams(self) -> list[int]:
        """The samples of the first microbatch whose last block's output is not finite."""
        last = self.program.config.model.layers - 1
        for microbatch in range(len(self.batch["inputs"]) // self.rows):
            wrong = np.flatnonzero(self.probed(microbatch, last, ""))
            if len(wrong):
                return [microbatch * self.rows + int(row) for row in wrong]
        return []

    def site(self, microbatch: int) -> tuple[str, int | None]:
        """Name and layer of a microbatch's first activation that is not finite. What the stream once holds stays."""
        low, high = -1, self.program.config.model.layers - 1
        while low < high:
            middle = (low + high) // 2
            if self.probed(microbatch, middle, "").any():
                high = middle
            else:
                low = middle + 1
        if low < 0:
            return "embedding", None
        inside = next((site for site in SITES if self.probed(microbatch, low, site).any()), "")
        return f"blocks.{inside}".rstrip("."), low

    def losses(self) -> list[int]:
        """The samples of the first microbatch whose loss is not finite while all before it is."""
        for first in range(0, len(self.batch["inputs"]), self.rows):
            members = list(range(first, first + self.rows))
            if found := _guilty(self.loss_is_wrong, members):
                return found
        return []

    def loss_is_wrong(self, samples: Sequence[int]) -> bool:
        """Whether the loss of these samples, of one microbatch, is not finite."""
        first = samples[0] // self.rows * self.rows
        mine = slice(first, first + self.rows)
        counted = np.isin(np.arange(first, first + self.rows), samples)[:, None]
        batch = {name: array[mine] for name, array in self.batch.items()}
        batch |= {"targets": np.where(counted, batch["targets"], -1)}
        loss, _ = jax.device_get(self.program.evaluate(self.params, self.program.place(batch)))
        return not np.isfinite(loss)

    def guilty(self) -> list[int]:
        """The samples whose gradients alone are not finite."""

        def wrong(samples: Sequence[int]) -> bool:
            loss, _, gradients, _ = self.examined(samples)
            return not np.isfinite(loss) or any(found.any() for found in gradients.values())

        return _guilty(wrong, list(range(len(self.batch["inputs"]))))


def _guilty(wrong: Callable[[Sequence[int]], bool], samples: Sequence[int], most: int = MOST) -> list[int]:
    """The first `most` samples that are wrong by themselves, found by halves."""
    if not wrong(samples):
        return []
    if len(samples) == 1:
        return list(samples)
    middle = len(samples) // 2
    found = _guilty(wrong, samples[:middle], most)
    return found + (_guilty(wrong, samples[middle:], most - len(found)) if len(found) < most else [])


def _first(program: Program, found: dict[str, np.ndarray], backwards: bool = False) -> tuple[str, int | None] | None:
    """Name and layer of the first parameter of which something was found, in the order in which they act, or backwards
    from the head; None where nothing was."""
    names = list(program.table)
    of_blocks = sorted((n for n in names if n.startswith(BLOCKS)), key=lambda n: ORDER.index(n.split(".")[1]))
    before, after = names[: names.index("final_norm.scale")], names[names.index("final_norm.scale") :]
    each: list[tuple[str, int | None]] = [(n, None) for n in before if not n.startswith(BLOCKS)]
    each += [(n, layer) for layer in range(program.config.model.layers) for n in of_blocks]
    each += [(n, None) for n in after]
    for name, layer in reversed(each) if backwards else each:
        if found[name] if layer is None else program.in_order(name, found[name])[layer]:
            return name, layer
    return None


# The programs, kept for the next bad step


@lru_cache(maxsize=1)
def _examine(program: Program) -> Any:
    """(params, placed batch, updates) -> loss, norm, and for each parameter what _wrong counts of its gradient and of
    itself."""
    step, whole = program.step_of, PartitionSpec()
    params = state_specs(step)["params"]
    found = {n: PartitionSpec(*spec[:1]) if n.startswith(BLOCKS) else whole for n, spec in params.items()}
    batch = {name: target.sharding.spec for name, target in program.batch_targets().items()}
    return _program(program, partial(_examined, step), (params, batch, whole), (whole, whole, found, found))


@lru_cache(maxsize=1)
def _probe(program: Program) -> Any:
    """(params, a microbatch, layer, site) -> entries of each sample's activation that are not finite."""
    step = program.step_of
    microbatch = PartitionSpec(*step.layout.batch()[1:])
    placed = dict.fromkeys(_read(program), microbatch)
    inputs = (state_specs(step)["params"], placed, PartitionSpec(), PartitionSpec())
    return _program(program, partial(_probed, step), inputs, PartitionSpec(*microbatch[:1]))


def _program(program: Program, function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> Any:
    """The function over the mesh; what it finds is whole on every device."""
    inside = on_mesh(program.step_of, program.mesh, function, inputs, outputs)
    every = NamedSharding(program.mesh, PartitionSpec())

    def run(*arguments: Any) -> Any:
        return jax.tree.map(lambda found: jax.reshard(found, every), inside(*arguments))

    return together.at_once(jax.jit(run))


def _examined(step: Step, params: Arrays, batch: Arrays, updates: jax.Array) -> tuple[Any, ...]:
    loss, gradients, _ = step.loss_and_gradients(params, batch, updates)
    specs = state_specs(step)["params"]

    def wrong(arrays: Arrays) -> Arrays:
        return {n: _wrong(step, a, specs[n], int(n.startswith(BLOCKS))) for n, a in arrays.items()}

    return loss, step.norm(gradients), wrong(gradients), wrong(params)


def _wrong(step: Step, x: jax.Array, spec: PartitionSpec, kept: int) -> jax.Array:
    """How many entries of a parameter are not finite, its first `kept` dimensions kept."""
    count = jnp.sum(~jnp.isfinite(x), axis=tuple(range(kept, x.ndim)), dtype=jnp.float32)
    axes = tuple(axis for axis in split_axes(PartitionSpec(*spec[kept:])) if axis in step.axes)
    return lax.psum(count, axes) if axes else count


def _read(program: Program) -> tuple[str, ...]:
    """What the blocks are told of a batch."""
    return ("inputs", "starts") if program.separate else ("inputs",)


def _probed(step: Step, params: Arrays, batch: Arrays, layer: jax.Array, site: jax.Array) -> jax.Array:
    def pick(taken: Arrays) -> jax.Array:
        return lax.select_n(site, *(taken[name] for name in SITES))

    x, _ = step.stream(params, batch["inputs"], partial(as_far_as, layer, pick), batch.get("starts"))
    count = jnp.sum(~jnp.isfinite(relayout(x, "batch seq embed")), axis=(1, 2), dtype=jnp.float32)
    return lax.psum(count, "context") if "context" in step.axes else count
