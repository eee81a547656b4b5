"""A run saved on one mesh goes on, on every other, as on its own: data, fsdp, tensor, pipe, context and a product."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quickly import placed, unoptimized
from tiny import GPT, batches, run_config

from jaxgpt.config import RunConfig
from jaxgpt.model.parameters import Parameter, parameters
from jaxgpt.training import parity
from jaxgpt.training.checkpoint import Writer
from jaxgpt.training.program import Program
from jaxgpt.training.resume import flatten, logical_shapes, restore_last, stored_rows

MESHES: dict[str, dict[str, Any]] = {
    "data=4": {"zero": 2, "micro_batch": 1},
    "fsdp=4": {},
    "tensor=4": {"sequence_parallel": True},
    "pipe=4": {"micro_batch": 2},
    "context=4": {},
    "data=2,fsdp=2,tensor=2": {"zero": 1},
}
"""Five layers: on four stages rows of the stored arrays are empty. 127 entries: the vocabulary is padded."""
FIRST, MORE = 2, 3
"""Steps before the save and after it."""


def configuration(**fields: Any) -> RunConfig:
    model = dataclasses.replace(GPT, layers=5)
    return run_config(model, global_batch=8, clip=0.25, **fields)


BATCHES = batches(configuration(), FIRST + MORE)


@cache
def program(mesh: str) -> Program:
    found = parity.program(configuration(**MESHES[mesh]), mesh)
    with unoptimized():
        assert found.compiled is not None
    return found


def save(folder: Path, of: Program, state: dict[str, Any], step: int) -> None:
    writer = Writer(folder, 1)
    writer.save(step, flatten(state), logical_shapes(state, of.logical), {}, stored_rows(state, of.rows))
    writer.close()


def opened(folder: Path, on: Program) -> dict[str, Any]:
    found = restore_last(folder, on.targets(), on.logical, pytest.fail, on.rows)
    assert found is not None
    return found.state


def train(on: Program, state: dict[str, Any], some: list[dict[str, np.ndarray]]) -> tuple[dict[str, Any], np.ndarray]:
    """The state after some batches, and loss and gradient norm of each."""
    found = []
    for batch in some:
        state, metrics = on.step(state, on.place(batch))
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return state, np.asarray(found)


@cache
def start() -> dict[str, Any]:
    """A state as one device holds it, drawn here: a start that is compiled costs as much as a step."""
    draw = np.random.default_rng(0)

    def drawn(parameter: Parameter) -> np.ndarray:
        array = np.zeros(parameter.shape, np.float32)
        scale = {"zeros": 0.0, "ones": 1.0}.get(str(parameter.std))
        within = tuple(slice(n) for n in parameter.logical)
        array[within] = draw.normal(0, 0.02, parameter.logical) if scale is None else scale
        return array

    table = parameters(configuration().model)
    moments = {kind: {n: np.zeros(p.shape, np.float32) for n, p in table.items()} for kind in ("mu", "nu")}
    return {"params": {n: drawn(p) for n, p in table.items()}, **moments, "step": np.int32(0)}


@pytest.mark.parametrize("mesh", MESHES)
def test_saved_on_a_mesh_it_goes_on_alike_on_every_other(mesh: str, tmp_path: Path) -> None:
    own = program(mesh)
    state, _ = train(own, placed(own, start()), BATCHES[:FIRST])
    save(tmp_path, own, state, FIRST)
    _, wanted = train(own, state, BATCHES[FIRST:])
    assert not np.allclose(wanted[0], wanted[1], rtol=1e-4)
    for other in MESHES:
        moved = program(other)
        _, found = train(moved, opened(tmp_path, moved), BATCHES[FIRST:])
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=f"{mesh} to {other}")
        if other == mesh:
            assert np.array_equal(found, wanted)
