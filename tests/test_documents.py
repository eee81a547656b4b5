"""Documents that are separate: no document sees another, on any mesh, and each is trained on as if it were alone."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from quickly import placed, unoptimized
from tiny import FAMILIES, GPT, LLAMA, batches, packed, run_config

from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.model import gpt
from jaxgpt.model.attention import Part
from jaxgpt.pipeline import loop
from jaxgpt.training import parity
from jaxgpt.training.program import Program
from jaxgpt.training.step import on_mesh, state_specs

pytestmark = pytest.mark.core

WINDOWED = dataclasses.replace(LLAMA, window=4)
MODELS = FAMILIES | {"windowed": WINDOWED}


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly():
    with unoptimized():
        yield


def separate(model: ModelConfig, **fields: Any) -> RunConfig:
    return run_config(model, documents="separate", **fields)


@cache
def start(family: str) -> dict[str, Any]:
    """The start of a model, on one device."""
    return jax.tree.map(np.asarray, parity.program(separate(FAMILIES[family]), "data=1").init())


def begun(model: str) -> dict[str, Any]:
    """Neither dropout nor a window changes the start."""
    return start("gpt" if model == "gpt" else "llama")


# One document does not see another


def logits(program: Program, params: Any, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    step, whole = program.step_of, program.layout.batch()
    spec = PartitionSpec(*whole[1:])
    out = PartitionSpec(*spec, program.layout.shared().get("vocab"))
    run = jax.jit(on_mesh(step, program.mesh, step.logits, (state_specs(step)["params"], spec, spec), out))
    where = NamedSharding(program.mesh, spec)
    found = [run(params, *(jax.device_put(program.split_order(x), where) for x in (each, starts))) for each in tokens]
    return np.stack([np.asarray(each)[:, program.sequence_order(tokens.shape[2])] for each in found])


LOGITS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("gpt", "data=1", {}),
    ("llama", "data=2,fsdp=2", {"zero": 1}),
    ("gpt", "tensor=4", {"sequence_parallel": True}),
    ("windowed", "fsdp=2,tensor=2", {}),
    ("llama", "context=4", {"context_attention": "ring"}),
    ("gpt", "context=2,tensor=2", {"context_attention": "gather", "sequence_parallel": True}),
    ("windowed", "pipe=2,tensor=2", {"sequence_parallel": True}),
)


@pytest.mark.parametrize(("model", "mesh", "fields"), LOGITS)
def test_logits_of_a_document_do_not_depend_on_another(model: str, mesh: str, fields: dict[str, Any]) -> None:
    """Not in one bit: of three documents the first and the last are changed."""
    config = separate(MODELS[model], **fields)
    program = parity.program(config, mesh)
    params = placed(program, begun(model))["params"]
    rng, seq = np.random.default_rng(0), config.model.seq
    tokens = rng.integers(0, config.model.vocab, (2, 4, seq)).astype(np.int32)
    begins = np.array([[0, 5, 11], [0, 1, 15], [0, 3, 8], [0, 8, 12]])
    place = np.arange(seq)
    document = (place >= begins[:, 1:2]).astype(int) + (place >= begins[:, 2:])
    tokens[1] = np.where(document == 1, tokens[0], tokens[1])
    found = logits(program, params, tokens, np.take_along_axis(begins, document, 1).astype(np.int32))
    same = (found[0] == found[1]).all(-1)
    assert same[document == 1].all()
    assert same[document != 1].mean() < 0.1
    joined = logits(program, params, tokens, np.zeros((4, seq), np.int32))
    assert not (joined[0] == joined[1]).all(-1)[place == begins[:, 1:2]].any()


# Packed is as separate


@pytest.mark.parametrize("model", ["gpt", "windowed"])
def test_packed_documents_are_trained_on_as_if_each_were_alone(model: str) -> None:
    """Loss and gradients of rows of several documents are those of the same documents in rows of their own."""
    config = separate(MODELS[model])
    batch = packed(config, 1)[0]
    rows, seq = batch["inputs"].shape
    alone: dict[str, list[np.ndarray]] = {"inputs": [], "targets": []}
    for row in range(rows):
        for first in np.unique(batch["starts"][row]):
            mine = batch["starts"][row] == first
            for name, nothing in (("inputs", 0), ("targets", -1)):
                alone[name].append(np.full(seq, nothing, np.int32))
                alone[name][-1][: mine.sum()] = batch[name][row, mine]
    count = len(alone["inputs"])
    assert count > 2 * rows
    ours = parity.program(config, "data=1")
    plain = parity.program(dataclasses.replace(config, documents="joined", global_batch=count), "data=1")
    params = placed(ours, begun(model))["params"]
    loss, found, tokens = ours.gradients(params, ours.place(batch), np.int32(0))
    wanted = plain.gradients(params, plain.place({n: np.stack(a) for n, a in alone.items()}), np.int32(0))
    assert int(tokens) == int(wanted[2])
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-5)
    largest = max(float(abs(g).max()) for g in wanted[1].values())
    for name, gradient in wanted[1].items():
        allowed = max(parity.OF_ARRAY * float(abs(gradient).max()), parity.OF_MODEL * largest)
        assert float(abs(gradient - found[name]).max()) <= allowed, name


def test_a_row_that_is_one_document_is_as_ever() -> None:
    config = separate(GPT)
    batch = batches(config, 1)[0]  # without a word about documents
    ours, plain = (parity.program(dataclasses.replace(config, documents=d), "data=1") for d in ("separate", "joined"))
    params = placed(ours, begun("gpt"))["params"]
    losses = [p.gradients(params, p.place(batch), np.int32(0))[0] for p in (ours, plain)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_dropout_is_of_the_place_in_the_sample() -> None:
    """Else two documents of a sample would be dropped alike."""
    model = dataclasses.replace(GPT, dropout=0.5)
    places, starts = jnp.arange(16), jnp.repeat(jnp.array([[0, 8]]), 8, axis=1)
    table, ones = {"position.weight": jnp.zeros((16, 32))}, jnp.ones((1, 16, 32))
    key, first = jnp.zeros(2, jnp.uint32), jnp.zeros(1, jnp.int32)
    dropped = [gpt.embed(model, table, ones, gpt.context(model, first, places, key, each)) for each in (None, starts)]
    np.testing.assert_array_equal(*dropped)
    assert not np.array_equal(dropped[1][0, :8], dropped[1][0, 8:])


# Every mesh as one device

PARITY: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("gpt", "context=4", 1, {"context_attention": "ring"}),
    ("gpt", "fsdp=2,tensor=2", 2, {"sequence_parallel": True, "zero": 2}),
    ("llama", "data=2,context=2,tensor=2", 2, {"context_attention": "gather", "recompute": "selective"}),
    ("llama", "pipe=2,context=2,tensor=2", 4, {"sequence_parallel": True, "schedule": "zero-bubble"}),
)
"""Model, mesh, microbatches of a device, and the rest."""


def configuration(model: str) -> RunConfig:
    return separate(dataclasses.replace(MODELS[model], dropout=0.1), clip=0.25)


@cache
def on_one_device(model: str) -> parity.Trace:
    return parity.trace(configuration(model), "data=1", packed(configuration(model), 2))


def on_the_mesh(
    model: str, mesh: str, microbatches: int, fields: dict[str, Any], patch: pytest.MonkeyPatch
) -> parity.Trace:
    before = begun(model)
    patch.setattr(Program, "init", lambda program: placed(program, before))
    sizes = dict(item.split("=") for item in mesh.split(","))
    share = 32 // (int(sizes.get("data", 1)) * int(sizes.get("fsdp", 1)))
    config = dataclasses.replace(configuration(model), micro_batch=share // microbatches, **fields)
    return parity.trace(config, mesh, packed(config, 2))


@pytest.mark.parametrize(("model", "mesh", "microbatches", "fields"), PARITY)
def test_a_mesh_computes_what_one_device_does(
    model: str, mesh: str, microbatches: int, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = on_one_device(model)
    found = parity.differences(one, on_the_mesh(model, mesh, microbatches, fields, monkeypatch))
    wrong = [d for d in found if not d.holds]
    assert not wrong, wrong[:3]


# Faults that parity finds


def edges_forgotten_on_the_ring(patch: pytest.MonkeyPatch) -> None:
    real = Part.forward

    def forward(self: Part, q: jax.Array, k: jax.Array, v: jax.Array, *starts: jax.Array) -> Any:
        return real(self, q, k, v, *(starts if self.causal else ()))

    patch.setattr(Part, "forward", forward)


def edges_of_the_first_microbatch(patch: pytest.MonkeyPatch) -> None:
    real = loop._Loop.one

    def one(self: Any, microbatch: jax.Array) -> Any:
        return real(self, microbatch) | {"starts": self.batch["starts"][0]}

    patch.setattr(loop._Loop, "one", one)


@pytest.mark.parametrize(
    ("fault", "mesh"),
    [
        (edges_forgotten_on_the_ring, "context=4"),
        (edges_of_the_first_microbatch, "pipe=2,context=2,tensor=2"),
    ],
)
def test_a_fault_is_found(fault: Any, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, microbatches, fields = next(case for case in PARITY if case[1] == mesh)
    one = on_one_device(model)
    fault(monkeypatch)
    found = parity.differences(one, on_the_mesh(model, mesh, microbatches, fields, monkeypatch))
    assert found[0].share > 1000, found[:3]
    assert {"loss", "gradient norm"} <= {d.name for d in found if not d.holds}
