"""Masters and moments in the host's memory: the same training, a layer at a time on the device, saved and opened alike.

On CPU both memories are one, but arrays have the kind that they would have elsewhere, and programs move them.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from quickly import unoptimized
from tiny import GPT, LLAMA, batches, run_config

from jaxgpt.config import RunConfig
from jaxgpt.training import checkpoint, parity
from jaxgpt.training.offload import HOST, KINDS
from jaxgpt.training.program import Program
from jaxgpt.training.resume import flatten, logical_shapes, restore_last, stored_rows

pytestmark = pytest.mark.core

CASES: dict[str, tuple[str, RunConfig]] = {
    "one device": ("data=1", run_config(dataclasses.replace(GPT, dropout=0.1), clip=0.25)),
    "split": ("data=2,fsdp=2,tensor=2", run_config(LLAMA, zero=1, sequence_parallel=True, clip=0.25)),
    "pipeline": ("pipe=2,data=2", run_config(dataclasses.replace(GPT, layers=3), zero=3, micro_batch=4, clip=0.25)),
}


def pair(case: str) -> tuple[Program, Program]:
    """Without and with offload."""
    mesh, config = CASES[case]
    return tuple(parity.program(dataclasses.replace(config, offload=each), mesh) for each in ("none", "optimizer"))


@pytest.mark.parametrize("case", CASES)
def test_no_number_changes(case: str) -> None:
    """But for rounding, as the compiler fuses what it is given in a loop in another way."""
    with unoptimized():
        without, with_it = (parity.steps(p, batches(p.config, 3)) for p in pair(case))
    assert without.losses[0] == with_it.losses[0]
    assert not [d for d in parity.differences(without, with_it) if not d.holds]


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def moved(program: Program, to: Any) -> list[tuple[int, ...]]:
    """Shapes of what the step moves to a memory, and reads there."""
    traced = program.traced.jaxpr
    live, _ = jax.interpreters.partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    puts = [e for e in equations(live) if e.primitive.name == "device_put" and to in e.params["devices"]]
    return [v.aval.shape for e in puts for v in e.outvars]


def test_the_state_lies_in_the_hosts_memory_and_passes_through_the_device_by_layers() -> None:
    _, program = pair("split")
    blocks = {p.shape for n, p in program.table.items() if n.startswith("blocks.")}
    for space in (jax.memory.Space.Device, jax.memory.Space.Host):
        shapes = moved(program, space)
        assert len(shapes) >= 3 * len(program.table)
        assert not blocks & set(shapes)
    assert not moved(pair("split")[0], jax.memory.Space.Host)
    with unoptimized():
        state = program.init()
        assert {a.sharding.memory_kind for kind in KINDS for a in state[kind].values()} == {HOST}
        after, _ = program.step(state, program.place(batches(program.config, 1)[0]))
    assert {a.sharding.memory_kind for kind in KINDS for a in after[kind].values()} == {HOST}


def test_evaluation_and_logits_read_them_there() -> None:
    found = []
    for program in pair("split"):
        batch = batches(program.config, 1)[0]
        with unoptimized():
            params = program.init()["params"]
            sums = program.evaluate(params, program.place(batch))
            found.append((*sums, program.logits(params, program.place_tokens(batch["inputs"]))))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_checkpoint_is_that_of_a_run_without_and_goes_on_with_it(tmp_path: Path) -> None:
    """Saved with offload in a pipeline, opened without on one device, and the other way."""
    _, piped = pair("pipeline")
    alone = parity.program(dataclasses.replace(CASES["pipeline"][1], zero=0), "data=1")
    with unoptimized():
        state = piped.init()
        state, _ = piped.step(state, piped.place(batches(piped.config, 1)[0]))
    kept = {name: np.asarray(array) for name, array in flatten(state).items()}
    for number, (saving, opening) in enumerate(((piped, alone), (alone, piped))):
        writer = checkpoint.Writer(tmp_path / str(number), keep=1)
        shapes, rows = logical_shapes(saving.targets(), saving.logical), stored_rows(saving.targets(), saving.rows)
        writer.save(1, flatten(state), shapes, {}, rows)
        writer.close()
        found = restore_last(tmp_path / str(number), opening.targets(), opening.logical, pytest.fail, opening.rows)
        assert found is not None
        state = found.state
        wanted = opening.targets()["params"]
        assert {n: a.sharding for n, a in state["params"].items()} == {n: t.sharding for n, t in wanted.items()}
    assert flatten(state).keys() == kept.keys()
    for name, array in flatten(state).items():
        np.testing.assert_array_equal(array, kept[name], err_msg=name)
