"""The ledger: hand-computed communication of every axis, the rules one by one, and compiled programs on CPU devices."""

import dataclasses
import math
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from tiny import GPT, run_config

import jaxgpt
from jaxgpt.model.parameters import parameters
from jaxgpt.pipeline import stage
from jaxgpt.planner.absent import stand_ins
from jaxgpt.sharding import ledger_rules
from jaxgpt.sharding.hlo import collectives
from jaxgpt.sharding.ledger import Line, Total, ledger, totals
from jaxgpt.sharding.mesh import build, parse
from jaxgpt.training.program import Program

pytestmark = pytest.mark.core

MODEL = dataclasses.replace(GPT, layers=3)
MICROBATCHES = 2
NEW_JAX = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)


def program(mesh: str, devices=None, **fields) -> Program:
    """Two microbatches of the tiny model, in fp32, on devices that are not there."""
    sizes = parse(mesh)
    shares = sizes["data"] * sizes["fsdp"]
    config = run_config(MODEL, micro_batch=16 // shares, dtype="fp32", **fields)
    assert config.global_batch == 16 * MICROBATCHES
    return Program(config, build(sizes, devices or stand_ins(math.prod(sizes.values()), "cpu", "none")))


def lines(mesh: str, **fields) -> list[Line]:
    p = program(mesh, **fields)
    return ledger(p._update.trace(p.targets(), p.batch_targets(), p.targets()["step"]).jaxpr, p.sizes)


def by_layer(found: list[Line], kind: str, axis: str) -> list[Line]:
    """Those that every layer of every microbatch runs."""
    return [
        each for each in found if (each.kind, each.axes, each.times) == (kind, (axis,), MODEL.layers * MICROBATCHES)
    ]


MATRICES = {
    "qkv": 3 * MODEL.width * MODEL.width,
    "out": MODEL.width * MODEL.width,
    "in": MODEL.width * MODEL.mlp,
    "down": MODEL.width * MODEL.mlp,
}
ELEMENTS = sum(math.prod(p.shape) for p in parameters(MODEL).values())
STREAM = 16 * MODEL.seq * MODEL.width * 4
"""Bytes of the residual stream of a microbatch."""


# What each axis must send, by hand


def test_one_device_sends_nothing():
    assert lines("data=1") == []


def test_tensor_sends_four_all_reduces_of_the_residual_stream_a_layer():
    found = lines("tensor=4")
    layer = by_layer(found, "all-reduce", "tensor")
    assert [each.result for each in layer] == [STREAM] * 4
    assert [each.phase for each in layer] == ["forward"] * 2 + ["backward"] * 2
    assert {each.received for each in layer} == {Fraction(2 * 3, 4) * STREAM}
    assert {each.change for each in layer} == {"P -> B"}
    assert {(each.kind, each.axes) for each in found} == {("all-reduce", ("tensor",))}


def test_sequence_parallelism_sends_as_much_as_gathers_and_scatters():
    layer = {
        kind: by_layer(lines("tensor=4", sequence_parallel=True), kind, "tensor")
        for kind in ("all-gather", "reduce-scatter")
    }
    assert [each.operand for each in layer["reduce-scatter"]] == [STREAM] * 4
    # Forward two and backward two, as four all-reduces have them, and two more since x is not kept whole.
    assert [each.result for each in layer["all-gather"]] == [STREAM] * 6


@pytest.mark.parametrize(("sequences", "dtype"), [(1, "bf16"), (2, "f32")])
def test_the_gradient_of_positions_is_gathered_in_fp32_where_it_is_a_sum(sequences: int, dtype: str):
    config = run_config(MODEL, micro_batch=sequences, dtype="bf16", sequence_parallel=True)
    p = Program(config, build(parse("tensor=4"), stand_ins(4, "cpu", "none")))
    found = ledger(p._update.trace(p.targets(), p.batch_targets(), p.targets()["step"]).jaxpr, p.sizes)
    shape = (MODEL.seq // 4, MODEL.width)
    assert [each.dtype for each in found if each.kind == "all-gather" and each.shape == shape] == [dtype]


def test_fsdp_gathers_twice_and_scatters_once_each_matrix_a_layer():
    found = lines("fsdp=4")
    gathers, scatters = (by_layer(found, kind, "fsdp") for kind in ("all-gather", "reduce-scatter"))
    assert sorted(each.result for each in gathers) == sorted(4 * n for n in MATRICES.values() for _ in range(2))
    assert sorted(each.operand for each in scatters) == sorted(4 * n for n in MATRICES.values())
    assert {each.phase for each in gathers} == {"gather"}
    assert {each.phase for each in scatters} == {"reduce"}


@pytest.mark.parametrize("mesh", ["data=4", "context=4"])
def test_data_and_context_reduce_each_gradient_once_a_step(mesh: str):
    found = [each for each in lines(mesh) if each.kind == "all-reduce"]
    assert {each.times for each in found} == {1}
    scalars = 2  # loss and tokens
    assert sum(each.result for each in found) == 4 * (ELEMENTS + scalars)


def test_zero_scatters_gradients_and_gathers_weights():
    split = sum(math.prod(p.shape) for p in parameters(MODEL).values() if "embed" in p.dims)
    found = totals(lines("data=4", zero=1))
    assert found["reduce-scatter", ("data",)].received == Fraction(3, 4) * 4 * split
    assert found["all-gather", ("data",)].received == Fraction(3, 4) * 4 * split
    a_microbatch = totals(lines("data=4", zero=2))
    assert a_microbatch["reduce-scatter", ("data",)].received == MICROBATCHES * Fraction(3, 4) * 4 * split


def test_every_line_of_the_program_is_one_of_jaxgpts():
    package = Path(jaxgpt.__file__).parent
    for each in lines("data=2,fsdp=2,tensor=2", sequence_parallel=True, zero=1):
        text = (package / each.source.file).read_text().splitlines()[each.source.line - 1]
        assert text.strip() and not text.strip().startswith(("#", '"""')), each
        assert not each.source.file.startswith("sharding/")
        assert not each.assumed


def test_a_planted_collective_is_one_line_more(monkeypatch):
    plain = lines("data=2,fsdp=2")
    right = stage.scatter_sum

    def wrong(gradient, dims, axes):
        whole = lax.psum(gradient, "data") if dims == ("embed", "mlp") else gradient
        return right(jax.lax.pcast(whole, "data", to="varying") if whole is not gradient else whole, dims, axes)

    monkeypatch.setattr(stage, "scatter_sum", wrong)
    planted = lines("data=2,fsdp=2")
    before, after = totals(plain), totals(planted)
    assert {key for key in after if after[key] != before.get(key)} == {("all-reduce", ("data",))}
    (extra,) = [each for each in planted if each.kind == "all-reduce" and each.times > 1]
    assert (extra.axes, extra.result, extra.times) == (("data",), 4 * MATRICES["in"], 3 * MICROBATCHES)
    assert (extra.source.file, extra.source.function) == ("pipeline/stage.py", "Stage._summed")


# The rules, one by one

MESH = AbstractMesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
SIZES = dict(MESH.shape)


def array(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.sharding.NamedSharding(MESH, spec))


def sent(function, *arguments) -> list[tuple[str, tuple[str, ...], str, int, int]]:
    """kind, axes, change, bytes received and times of what a function sends; arguments: (shape, spec) of fp32."""
    with jax.sharding.use_abstract_mesh(MESH):
        found = ledger(jax.jit(function).trace(*(array(*each) for each in arguments)).jaxpr, SIZES)
    return [(each.kind, each.axes, each.change, int(each.received), each.times) for each in found]


def product(out: P):
    return lambda x, w: jnp.einsum("ab,bc->ac", x, w, out_sharding=out)


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (P(), [("all-reduce", ("tensor",), "P -> B", 2 * 3 * 8 * 16 * 4 // 4, 1)]),
        (P("tensor"), [("reduce-scatter", ("tensor",), "P -> S(0)", 3 * 8 * 16 * 4 // 4, 1)]),
        (P(None, "tensor"), [("reduce-scatter", ("tensor",), "P -> S(1)", 3 * 8 * 16 * 4 // 4, 1)]),
    ],
)
def test_a_product_over_a_split_dimension(out, expected):
    assert sent(product(out), ((8, 32), P(None, "tensor")), ((32, 16), P("tensor"))) == expected


def test_products_along_other_dimensions():
    rows, columns, whole = ((8, 32), P("tensor")), ((32, 16), P(None, "tensor")), ((32, 16), P())
    assert sent(product(P("tensor")), rows, whole) == []
    assert sent(product(P(None, "tensor")), ((8, 32), P()), columns) == []
    # One of two can stay split; the other is gathered.
    assert sent(product(P("tensor")), rows, columns) == [("all-gather", ("tensor",), "S(1) -> B", 3 * 32 * 16, 1)]

    def batched(x, w):
        return jnp.einsum("nab,nbc->nac", x, w)

    assert sent(batched, ((4, 8, 8), P("tensor")), ((4, 8, 8), P("tensor"))) == []


def test_a_product_that_stays_partial_sends_nothing():
    partial = product(P(unreduced={"tensor"}))
    arguments = ((8, 32), P(None, "tensor")), ((32, 16), P("tensor"))
    assert sent(partial, *arguments) == []

    def boxed(x, w):
        return jax.reshard(partial(x, w), P("tensor"))

    assert sent(boxed, *arguments) == [("reduce-scatter", ("tensor",), "P -> S(0)", 3 * 8 * 16, 1)]


@pytest.mark.parametrize(
    ("function", "change"), [(jnp.sum, "P -> B"), (jnp.max, "max -> B"), (jnp.argmax, "argmax -> B")]
)
def test_reductions_over_a_split_dimension(function, change):
    assert sent(lambda x: function(x, 0), ((32, 8), P("tensor"))) == [("all-reduce", ("tensor",), change, 2 * 3 * 8, 1)]
    assert sent(lambda x: function(x, 1), ((32, 8), P("tensor"))) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (P("tensor"), P(), [("all-gather", ("tensor",), "S(0) -> B", 3 * 8 * 8, 1)]),
        (P(), P("tensor"), []),
        (P("tensor"), P(None, "tensor"), [("all-to-all", ("tensor",), "S(0) -> S(1)", 3 * 8 * 8 // 4, 1)]),
        (P("tensor"), P("tensor"), []),
    ],
)
def test_boxing(before, after, expected):
    assert sent(lambda x: jax.reshard(x, after), ((8, 8), before)) == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.reshape(x, (4, 8), out_sharding=P()),
        lambda x: lax.rev(x, (0,)),
        lambda x: lax.concatenate([x, x], 0),
        lambda x: lax.slice_in_dim(x, 0, 4),
    ],
)
def test_where_no_rule_is_known_the_operand_is_taken_to_be_gathered(function):
    with jax.sharding.use_abstract_mesh(MESH):
        found = ledger(jax.jit(function).trace(array((8, 4), P("tensor"))).jaxpr, SIZES)
    assert {(each.kind, each.result, each.assumed) for each in found} == {("all-gather", 8 * 4 * 4, True)}


def test_moving_elements_along_other_dimensions_sends_nothing():
    arguments = ((8, 4), P("tensor")), ((8, 4), P("tensor"))
    assert sent(lambda x, y: lax.rev(lax.concatenate([x, y], 1), (1,))[:, 1:3], *arguments) == []


def manual(function):
    """function on the devices' parts of the first dimension, over both axes."""
    return jax.shard_map(function, mesh=MESH, in_specs=P(("data", "tensor")), out_specs=P(("data", "tensor")))


def test_collectives_that_a_program_says():
    both, part = ("data", "tensor"), 4 * 4  # bytes that a device holds of fp32[32]
    found = sent(manual(lambda x: lax.all_gather(x, both)[0] + lax.psum(x, both)), ((32,), P(both)))
    assert found == [
        ("all-gather", both, "S(0) -> B", 7 * part, 1),
        ("all-reduce", both, "P -> B", 2 * 7 * part // 8, 1),
    ]
    passing = manual(lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]))
    assert sent(passing, ((32,), P(both))) == [("collective-permute", ("data",), "passed on", part, 1)]
    crossing = manual(lambda x: lax.all_to_all(x, "tensor", 1, 0, tiled=True))
    assert sent(crossing, ((8, 4), P(both))) == [("all-to-all", ("tensor",), "S(0) -> S(1)", 3 * part // 4, 1)]


def test_loops_multiply_and_dead_code_does_not_count():
    def step(x, _):
        return x + lax.psum(x, "data"), lax.all_gather(x, "tensor")

    def twice(x):
        def outer(x, _):
            return (lax.scan(step, x, None, length=3)[0], None)

        return lax.scan(outer, lax.pcast(x, (), to="varying"), None, length=5)[0]

    assert [(each[0], each[-1]) for each in sent(manual(twice), ((32,), P(("data", "tensor"))))] == [("all-reduce", 15)]


def test_what_is_sent_twice_alike_is_sent_once():
    """As compilers merge it: through calls, but not with what a loop's body or recomputation sends."""

    def whole(x):
        return jax.reshard(x, P())

    called = jax.custom_vjp(whole)
    called.defvjp(lambda x: (called(x), x), lambda x, dy: (dy,))

    def alike(x):
        return whole(x) + jax.jit(whole)(x) + jax.jit(lambda x: called(x))(x)

    doubled = jax.jit(lambda x: whole(x + x))  # one program, called with two arrays

    def apart(x):
        looped = lax.scan(lambda total, _: (total + whole(x), None), whole(x), None, length=3)[0]
        return looped + jax.checkpoint(lambda x: whole(x) * 2)(x) + doubled(2 * x) + doubled(3 * x)

    with jax.sharding.use_abstract_mesh(MESH):
        (line,) = ledger(jax.jit(alike).trace(array((8, 4), P("tensor"))).jaxpr, SIZES)
        others = ledger(jax.jit(apart).trace(array((8, 4), P("tensor"))).jaxpr, SIZES)
    assert (line.kind, line.times, line.merged) == ("all-gather", 1, 2)
    assert sorted((each.times, each.merged) for each in others) == [(1, 0)] * 4 + [(3, 0)]


def test_of_a_cond_the_dearest_branch_is_counted():
    def choose(x):
        small, large = (lambda x: x + lax.psum(x, "data")), (lambda x: x + lax.psum(x, ("data", "tensor")))
        return lax.cond(lax.psum(x[0], ("data", "tensor")) > 0, small, large, x)

    found = sent(manual(choose), ((32,), P(("data", "tensor"))))
    assert [each[1] for each in found] == [("data", "tensor")] * 2


def test_a_loop_of_unknown_length_and_an_unknown_collective_are_refused(monkeypatch):
    def until(x):
        return lax.while_loop(lambda x: x[0] < 9, lambda x: x + lax.psum(x, "data"), x)

    with pytest.raises(ValueError, match="all-reduce in a loop of unknown length"):
        sent(manual(until), ((32,), P(("data", "tensor"))))
    monkeypatch.setattr(ledger_rules, "GATHERS", ())
    with pytest.raises(ValueError, match="all_gather over data: a collective that the ledger does not know"):
        sent(manual(lambda x: lax.all_gather(x, "data")[0]), ((32,), P(("data", "tensor"))))


@pytest.mark.parametrize(
    ("body", "times"),
    [
        (lambda total, x: total + jnp.sum(x, 0), 1),
        (lambda total, x: total + (jnp.sum(x, 0) + jnp.zeros(8)).astype(jnp.float32), 1),
        (lambda total, x: total + jnp.sum(x * total, 0), 5),  # what is added up is read in the loop
        (lambda total, x: total + 2 * jnp.sum(x, 0), 5),  # what is added is not the sum itself
        (lambda total, x: jnp.sum(x, 0), 5),  # nothing is added up
    ],
)
def test_an_all_reduce_that_a_loop_only_adds_up_is_moved_behind_it(body, times: int):
    def program(x):
        return lax.scan(lambda total, _: (body(total, x), None), jnp.zeros(8), None, length=5)[0]

    with jax.sharding.use_abstract_mesh(MESH):
        jaxpr = jax.jit(program).trace(array((32, 8), P("tensor"))).jaxpr
    assert [each.times for each in ledger(jaxpr, SIZES)] == [5]
    assert [each.times for each in ledger(jaxpr, SIZES, moved=True)] == [times]


# Against compiled programs


MESHES = ["data=2,fsdp=2", "data=2,fsdp=2,tensor=2"] if NEW_JAX else ["data=2,fsdp=2"]


@pytest.mark.parametrize("mesh", MESHES)
def test_the_compiled_program_holds_what_is_predicted(mesh: str):
    """Kinds, bytes and turns; XLA combines all-reduces, so of those the number alone may be smaller."""
    sizes = parse(mesh)
    p = program(mesh, jax.devices()[: math.prod(sizes.values())], zero=1)
    predicted = ledger(p._update.trace(p.targets(), p.batch_targets(), p.targets()["step"]).jaxpr, sizes)
    # On CPUs XLA gathers what no turn of the loop changes once, before it: embedding and head.
    once = [each.phase == "gather" and each.times == MICROBATCHES for each in predicted]
    hoisted = [dataclasses.replace(each, times=1) if o else each for o, each in zip(once, predicted, strict=True)]
    found: dict[tuple[str, tuple[str, ...]], Total] = {}
    for one in collectives(p.compiled.as_text()):
        key = one.kind, one.axes(sizes)
        found[key] = found.get(key, Total()).add(one.times, one.result, one.received)
    expected = totals(hoisted)
    assert found.keys() == expected.keys()
    for (kind, axes), total in expected.items():
        assert found[kind, axes].received == total.received, (kind, axes)
        assert found[kind, axes].result == total.result, (kind, axes)
        if kind != "all-reduce":
            assert found[kind, axes].times == total.times, (kind, axes)
