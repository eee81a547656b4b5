"""Pipelines: every schedule computes what one device does, keeps what its table says, and evaluates alike."""

import dataclasses
from functools import cache
from itertools import groupby
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from quickly import placed, unoptimized
from tiny import GPT, LLAMA, batches, run_config

from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.pipeline.buffers import plan
from jaxgpt.pipeline.schedule import schedule
from jaxgpt.sharding.jaxprs import scan_of
from jaxgpt.training import parity
from jaxgpt.training.program import Program

pytestmark = pytest.mark.core

MODELS: dict[str, ModelConfig] = {
    "gpt of 7": dataclasses.replace(GPT, layers=7, dropout=0.1),
    "gpt of 8": dataclasses.replace(GPT, layers=8, tied=False),
    "llama of 8": dataclasses.replace(LLAMA, layers=8, tied=False, dropout=0.1),
    "llama of 30": dataclasses.replace(LLAMA, layers=30),
}
BATCH = 24
"""It can be cut into 1, 2, 3, 4, 6, 8, 12 and 24 microbatches."""
CASES: tuple[tuple[str, str, str, int, dict[str, Any]], ...] = (
    ("1f1b", "pipe=2,data=2", "gpt of 7", 6, {"zero": 1, "recompute": "full:2"}),
    ("1f1b", "pipe=4,tensor=2", "llama of 8", 4, {"sequence_parallel": True, "recompute": "selective"}),
    ("1f1b", "pipe=8", "llama of 30", 12, {"recompute": "full"}),
    ("gpipe", "pipe=2,context=2,tensor=2", "gpt of 8", 1, {"recompute": "selective"}),
    ("gpipe", "pipe=4,fsdp=2", "llama of 30", 3, {}),
    ("interleaved", "pipe=2,data=2,fsdp=2", "gpt of 7", 6, {"virtual_stages": 3, "zero": 1, "recompute": "full"}),
    ("interleaved", "pipe=4,data=2", "llama of 8", 4, {"virtual_stages": 2}),
    ("interleaved", "pipe=8", "llama of 30", 8, {"virtual_stages": 3, "recompute": "selective"}),
    (
        "interleaved",
        "pipe=2,context=2,tensor=2",
        "gpt of 8",
        6,
        {"virtual_stages": 2, "sequence_parallel": True, "recompute": "selective:1"},
    ),
    ("zero-bubble", "pipe=2,fsdp=2,context=2", "gpt of 7", 1, {"stages": "5,2", "recompute": "full:3"}),
    ("zero-bubble", "pipe=4,tensor=2", "llama of 30", 6, {"sequence_parallel": True, "recompute": "full"}),
    ("zero-bubble", "pipe=8", "llama of 8", 3, {"recompute": "selective"}),
)
"""Schedule, mesh, model, microbatches, and the rest. Whole backwards (1f1b and gpipe, which are one program with two
tables), chunks, and split backwards each meet 2, 4 and 8 stages, what splits inside the loop (tensor, with and without
the sequence, fsdp, context), and recomputation; data and zero 1, which come after it, meet some. Microbatches are 1,
fewer than the stages, as many, more, and more but not a multiple; layers are as many on each stage or not, and compute
again all of them, none, or the first few."""


def configuration(model: str, **fields: Any) -> RunConfig:
    return run_config(MODELS[model], global_batch=BATCH, clip=0.25, **fields)


@cache
def on_one_device(model: str) -> tuple[dict[str, Any], parity.Trace]:
    """The start, and what it computes in two steps."""
    config = configuration(model)
    with unoptimized():
        one = parity.program(config, "data=1")
        start = jax.tree.map(np.asarray, one.init())
        return start, parity.steps(one, batches(config, 2))


def piped(schedule: str, mesh: str, model: str, microbatches: int, fields: dict[str, Any]) -> Program:
    config = configuration(model, schedule=schedule, **fields)
    found = parity.program(config, mesh)
    shares = found.sizes["data"] * found.sizes["fsdp"]
    return parity.program(dataclasses.replace(config, micro_batch=BATCH // shares // microbatches), mesh)


@pytest.mark.parametrize(("schedule", "mesh", "model", "microbatches", "fields"), CASES)
def test_a_pipeline_computes_what_one_device_does(
    schedule: str,
    mesh: str,
    model: str,
    microbatches: int,
    fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, one = on_one_device(model)
    # that it is the same on every placement is tested below
    monkeypatch.setattr(Program, "init", lambda program: placed(program, start))
    program = piped(schedule, mesh, model, microbatches, fields)
    assert program.batch_targets()["inputs"].shape[0] == microbatches
    with unoptimized():
        found = parity.steps(program, batches(program.config, 2))
    wrong = [d for d in parity.differences(one, found) if not d.holds]
    assert not wrong


UNEVEN = ("interleaved", "pipe=2,data=2", "gpt of 7", 6, {"virtual_stages": 3})
"""Six parts, of which the last has two layers: rows are out of order, and half of them are empty."""


def test_the_start_is_the_same_on_every_placement_and_empty_rows_have_nothing_that_decays() -> None:
    start, _ = on_one_device("gpt of 7")
    program = piped(*UNEVEN)
    with unoptimized():
        state = program.init()
    for name, array in start["params"].items():
        found = np.asarray(state["params"][name])
        np.testing.assert_array_equal(program.in_order(name, found), array, err_msg=name)
        empty = [row for row, layer in enumerate(program.rows.get(name, ())) if layer < 0]
        assert not (program.table[name].decays and found[empty].any()), name
    assert program.rows["blocks.mlp.up.weight"] == (0, -1, 2, -1, 4, -1, 1, -1, 3, -1, 5, 6)


def test_logits_and_evaluation_are_one_devices() -> None:
    """Of a model whose layers lie on stages out of order."""
    start, _ = on_one_device("gpt of 7")
    program = piped(*UNEVEN)
    one = parity.program(dataclasses.replace(program.config, schedule="1f1b", virtual_stages=1), "data=1")
    batch, rows = batches(program.config, 1)[0], program.micro_batch
    params = placed(program, start)["params"]
    with unoptimized():
        expected = np.asarray(one.logits(placed(one, start)["params"], one.place_tokens(batch["inputs"])))
        logits = program.text_order(program.logits(params, program.place_tokens(batch["inputs"])))
        last = np.arange(5, dtype=np.int32) + 3
        prompts = [row[: end + 1].tolist() for row, end in zip(batch["inputs"], last, strict=False)]
        follows = program.decoding(params).start(prompts, 1)  # an odd number of rows, over data=2
        parts = [{n: a[i : i + rows] for n, a in batch.items()} for i in range(0, BATCH, rows)]
        sums = np.sum([[float(x) for x in program.evaluate(params, program.place(part))] for part in parts], axis=0)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(follows, expected[np.arange(5), last][:, : GPT.vocab], rtol=1e-4, atol=1e-6)
    valid = batch["targets"] >= 0
    at_target = np.take_along_axis(expected, np.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    losses = np.log(np.exp(expected.astype(np.float64)).sum(-1)) - at_target
    np.testing.assert_allclose(sums, [losses[valid].sum(), valid.sum()], rtol=1e-6)


# What the loop carries


def scans(jaxpr: Jaxpr) -> list[JaxprEqn]:
    found = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    return found + [each for e in jaxpr.eqns for inner in jaxprs_in_params(e.params) for each in scans(inner)]


def carried(name: str, stages: int, microbatches: int) -> tuple[list[Any], list[Any]]:
    """Types of what the loop adds up, loss and gradients, and of its rings."""
    model = dataclasses.replace(GPT, layers=4)
    chunks = 2 if name == "interleaved" else 1
    config = run_config(model, global_batch=microbatches, micro_batch=1, schedule=name, virtual_stages=chunks)
    program = parity.program(config, f"pipe={stages}")
    step = jax.ShapeDtypeStruct((), np.int32)
    traced = program.gradients.trace(program.targets()["params"], program.batch_targets(), step).jaxpr
    ticks = len(schedule(name, stages, microbatches, chunks).operation)
    (loop,) = [equation for equation in scans(traced.jaxpr) if equation.params["length"] == ticks]
    scan = scan_of(loop)
    assert scan is not None
    types = [v.aval for v in loop.invars[scan.consts : scan.consts + scan.carry]]
    sums = 1 + len(program.step_of.dims)
    return types[:sums], types[sums:]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zero-bubble"])
def test_rings_have_the_places_of_the_plan(name: str) -> None:
    chunks = 2 if name == "interleaved" else 1
    wanted = plan(schedule(name, 2, 12, chunks))
    sums, rings = carried(name, 2, 12)
    assert {t.dtype for t in sums} == {np.dtype("float32")}
    places = [t.shape[0] for t in rings]
    assert (places[0], places[1], places[-1]) == (wanted.inbox_forward, wanted.inbox_backward, wanted.heads)
    kept = [wanted.residuals, *([wanted.splits] if wanted.splits else [])]
    assert [count for count, _ in groupby(places[2:-1])] == [count for count, _ in groupby(kept)]
    # a stage keeps each block's input and something of its inside, and the weights' part of a backward needs more
    assert len(places) > (10 if wanted.splits else 6)


def test_a_1f1b_loop_carries_no_more_with_more_microbatches_and_gpipes_does() -> None:
    few, many = (carried("1f1b", 4, count) for count in (8, 32))
    assert few == many
    few, many = (carried("gpipe", 4, count) for count in (8, 32))
    assert few[0] == many[0]
    assert few != many
