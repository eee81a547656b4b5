"""What ZeRO's stages leave on each device: bytes a parameter, read from arrays, compiled program and traced loop.

Expected is the line for fp32 gradients: 18, 6 + 12/N, 2 + 16/N and 18/N bytes a parameter on N devices (arXiv
1910.02054, which counts 2 for gradients), exactly, for every matrix. Vectors (norms and biases) are whole on every
device by design: 12 bytes in masters and moments, 4 in gradients, and computed with as they are.
"""

import dataclasses
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from quickly import unoptimized
from tiny import GPT, LLAMA, batches, run_config

from jaxgpt.config import ModelConfig
from jaxgpt.model.parameters import parameters
from jaxgpt.sharding.jaxprs import scan_of
from jaxgpt.training import parity
from jaxgpt.training.program import Program

pytestmark = pytest.mark.core

CASES = [(0, 4, "gpt"), (1, 8, "llama"), (2, 4, "llama"), (3, 8, "gpt")]
MODELS: dict[str, ModelConfig] = {
    "gpt": dataclasses.replace(GPT, layers=1),
    "llama": dataclasses.replace(LLAMA, layers=1, tied=False),
}
A_PARAMETER = {0: lambda n: 18, 1: lambda n: 6 + 12 / n, 2: lambda n: 2 + 16 / n, 3: lambda n: 18 / n}
"""Bytes of a matrix's parameter on each of n devices, by stage of ZeRO."""
MICROBATCHES = 2


def counted(model: ModelConfig) -> tuple[int, int]:
    """Parameters in matrices, and in vectors: those that have no `embed` to be split over."""
    sizes = [(math.prod(p.shape), "embed" in p.dims) for p in parameters(model).values()]
    return sum(n for n, matrix in sizes if matrix), sum(n for n, matrix in sizes if not matrix)


@cache
def program(zero: int, devices: int, family: str) -> Program:
    config = run_config(
        MODELS[family], zero=zero, dtype="bf16", global_batch=32, micro_batch=32 // devices // MICROBATCHES
    )
    return parity.program(config, f"data={devices}")


def bytes_on(device: Any, arrays: Any) -> int:
    shards = [s for a in jax.tree.leaves(arrays) for s in a.addressable_shards if s.device == device]
    return sum(s.data.nbytes for s in shards)


def equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: isinstance(v, Jaxpr | ClosedJaxpr)
        ):
            if isinstance(value, Jaxpr | ClosedJaxpr):
                yield from equations(value)


def loop(p: Program) -> tuple[list[Any], list[Any]]:
    """Types of what the loop over microbatches reads, and of what it carries, on one device."""
    step = jax.ShapeDtypeStruct((), np.int32)
    traced = p.gradients.trace(p.targets()["params"], p.batch_targets(), step).jaxpr
    scans = [e for e in equations(traced) if e.primitive.name == "scan" and e.params["length"] == MICROBATCHES]
    types, scan = [v.aval for v in scans[0].invars], scan_of(scans[0])
    assert scan is not None
    return types[: scan.consts], types[scan.consts : scan.consts + scan.carry]


def nbytes(types: list[Any]) -> int:
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in types)


@pytest.mark.parametrize(("zero", "devices", "family"), CASES)
def test_masters_and_moments_on_each_device(zero: int, devices: int, family: str) -> None:
    p = program(zero, devices, family)
    matrices, vectors = counted(MODELS[family])
    expected = 12 * matrices // (devices if zero else 1) + 12 * vectors
    with unoptimized():
        state, batch, compiled = p.init(), p.place(batches(p.config, 1)[0]), p.compiled
    held = {kind: state[kind] for kind in ("params", "mu", "nu")}
    assert [bytes_on(device, held) for device in p.mesh.devices.flat] == [expected] * devices
    # the numbers of samples are read by dropout alone, which there is none of here
    rest = bytes_on(p.mesh.devices.flat[0], [state["step"], p.none_undone, batch["inputs"], batch["targets"]])
    assert compiled.memory_analysis().argument_size_in_bytes == expected + rest


@pytest.mark.parametrize(("zero", "devices", "family"), CASES)
def test_weights_and_gradients_in_the_loop(zero: int, devices: int, family: str) -> None:
    reads, carries = loop(program(zero, devices, family))
    matrices, vectors = counted(MODELS[family])
    weights = [t for t in reads if t.dtype == jax.numpy.bfloat16]
    assert nbytes(weights) == 2 * matrices // (devices if zero == 3 else 1)
    loss, gradients = 4, 4 * matrices // (devices if zero >= 2 else 1) + 4 * vectors
    assert nbytes(carries) == loss + gradients
    assert {t.dtype for t in carries} == {np.dtype("float32")}


@pytest.mark.parametrize(("zero", "devices", "family"), CASES)
def test_a_matrix_takes_what_the_stage_says(zero: int, devices: int, family: str) -> None:
    """All that lives through a step, vectors left out."""
    p = program(zero, devices, family)
    reads, carries = loop(p)
    matrices, vectors = counted(MODELS[family])
    state = sum(3 * 4 * math.prod(s.shard_shape(parameters(p.config.model)[n].shape)) for n, s in p.shardings.items())
    weights = nbytes([t for t in reads if t.dtype == jax.numpy.bfloat16])
    found = state - 12 * vectors + weights + nbytes(carries) - 4 - 4 * vectors
    assert found == A_PARAMETER[zero](devices) * matrices
