"""Collectives read from HLO text: every form in which XLA writes them, and real programs of the installed JAX."""

import textwrap
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import definition
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.sharding.hlo import Collective, collectives

pytestmark = pytest.mark.core

SIZES = {"a": 2, "b": 4}


def module(entry: str, others: str = "", tables: str = "") -> str:
    """A module for 8 devices, with these lines in its entry computation."""
    lines = textwrap.indent(textwrap.dedent(entry).strip(), "  ")
    return (
        "HloModule jit_f, entry_computation_layout={(f32[8,8]{1,0})->f32[8,8]{1,0}}, num_partitions=8\n"
        f"\n{textwrap.dedent(tables).lstrip()}\n{textwrap.dedent(others)}\n"
        f"ENTRY %main.1_spmd (param: f32[8,8]) -> f32[8,8] {{\n  %param = f32[8,8]{{1,0}} parameter(0)\n{lines}\n}}\n"
    )


def only(text: str) -> Collective:
    (found,) = collectives(text)
    return found


def sizes_of(found: Collective) -> tuple[str, str, int, int, tuple[str, ...], Fraction]:
    return found.kind, found.dtype, found.operand, found.result, found.axes(SIZES), found.received


# One instruction


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "ROOT %all_gather.2 = f32[8,8]{1,0} all-gather(%param), channel_id=1, "
            "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, use_global_device_ids=true",
            ("all-gather", "f32", 64, 256, ("b",), 192),
        ),
        (
            "ROOT %psum.21 = bf16[8,8]{1,0} all-reduce(%param), channel_id=1, "
            "replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%region_3.4",
            ("all-reduce", "bf16", 128, 128, ("a",), 128),
        ),
        (
            "%reduce_scatter.7 = f32[2,8]{1,0} reduce-scatter(%param), replica_groups=[2,4]<=[8], dimensions={0}, "
            "to_apply=%add",
            ("reduce-scatter", "f32", 256, 64, ("b",), 192),
        ),
        (
            "%all-to-all = (f32[8,2]{1,0}, f32[8,2]{1,0}, /*index=2*/f32[8,2]{1,0}, f32[8,2]{1,0}) all-to-all(%s, "
            "%s.1, %s.2, %s.3), replica_groups=mesh['a'=2,'b'=4] {'b'}, metadata={op_name=\"jit(f)/all_to_all\"}",
            ("all-to-all", "f32", 256, 256, ("b",), 192),
        ),
        (
            "%ppermute.3 = s8[4]{0} collective-permute(%param), channel_id=1, "
            "source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}",
            ("collective-permute", "s8", 4, 4, ("a",), 4),
        ),
        (
            "%all-reduce = (f32[4]{0}, bf16[4]{0}, pred[]) all-reduce(%x, %y, %z), replica_groups={}, to_apply=%add",
            ("all-reduce", "bf16+f32+pred", 25, 25, ("a", "b"), Fraction(25 * 7, 4)),
        ),
        (
            "%c = f8e4m3fn[16]{0:T(256)S(1)} collective-broadcast(%param), replica_groups=[4,2]<=[2,4]T(1,0)",
            ("collective-broadcast", "f8e4m3fn", 16, 16, ("a",), 16),
        ),
        (
            "%g = s4[3]{0:E(4)} all-gather(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, dimensions={0}",
            ("all-gather", "s4", 2, 2, (), 0),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_one_instruction(line, expected):
    found = only(module(line))
    assert sizes_of(found) == expected
    assert found.times == 1 and found.exact


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%s = (f32[128,512]{1,0}, f32[512,512]{1,0}) all-gather-start(%p), replica_groups=[2,4]<=[8]",
            ("all-gather", "f32", 2**18, 2**20, ("b",), 3 * 2**18),
        ),
        (
            "%s = ((f32[128,512]{1,0}), f32[512,512]{1,0}) all-gather-start(%p), "
            "replica_groups=mesh['a'=2,'b'=4] {'b'}",
            ("all-gather", "f32", 2**18, 2**20, ("b",), 3 * 2**18),
        ),
        (
            "%s = ((bf16[2]{0}, bf16[4]{0}), (bf16[8]{0}, bf16[16]{0})) all-gather-start(%p, %q), "
            "replica_groups={{0,1,2,3},{4,5,6,7}}",
            ("all-gather", "bf16", 12, 48, ("b",), 36),
        ),
        (
            "%s = ((f32[512]{0}), f32[128]{0}) reduce-scatter-start(%p), replica_groups=[2,4]<=[8], to_apply=%add",
            ("reduce-scatter", "f32", 2048, 512, ("b",), 1536),
        ),
        (
            "%s = f32[512]{0} all-reduce-start(%p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add",
            ("all-reduce", "f32", 2048, 2048, ("a",), 2048),
        ),
        (
            "%s = (f32[512]{0}, f32[16]{0}) all-reduce-start(%p, %q), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add",
            ("all-reduce", "f32", 2112, 2112, ("a",), 2112),
        ),
        (
            "%s = ((f32[512]{0}), f32[512]{0}) all-reduce-start(%p), replica_groups={}, to_apply=%add",
            ("all-reduce", "f32", 2048, 2048, ("a", "b"), 3584),
        ),
        (
            "%s = ((f32[512,512]{0,1}), f32[512,512]{0,1}) all-to-all-start(%p), replica_groups={{0,1,2,3},{4,5,6,7}}",
            ("all-to-all", "f32", 2**20, 2**20, ("b",), 3 * 2**18),
        ),
        (
            "%s = (bf16[512]{0}, bf16[512]{0}, u32[], u32[]) collective-permute-start(%p), "
            "source_target_pairs={{0,1},{1,2}}",
            ("collective-permute", "bf16", 1024, 1024, ("b",), 1024),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_an_asynchronous_pair_is_counted_once(line, expected):
    done = f"ROOT %d = f32[8]{{0}} {expected[0]}-done(%s), replica_groups={{}}"
    assert sizes_of(only(module(f"{line}\n{done}"))) == expected


# Groups


@pytest.mark.parametrize(
    ("groups", "sizes", "size", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", {"pipe": 1, "a": 2, "b": 4}, 4, ("b",)),
        ("[1,8]<=[8]", SIZES, 8, ("a", "b")),
        ("[8,1]<=[8]", SIZES, 1, ()),
        ("[2,4]<=[2,2,2]T(1,0,2)", {"a": 2, "b": 2, "c": 2}, 4, ("a", "c")),
        ("[4,2]<=[2,2,2]T(2,0,1)", {"a": 2, "b": 2, "c": 2}, 2, ("b",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", SIZES, 2, ("b",)),  # half of an axis
        ("mesh['a'=2,'b'=4] {'a'}", SIZES, 2, ("a",)),
        ("mesh['a'=2,'b'=4] {'a','b'}", SIZES, 8, ("a", "b")),
        ("mesh['x'=8] {'x':(1)2}", SIZES, 2, ("a",)),  # the major part of an axis of the compiler's own
        ("mesh['x'=8] {'x':(2)4}", SIZES, 4, ("b",)),
        ("mesh['x'=8] {'x':(2)2}", {"a": 2, "b": 2, "c": 2}, 2, ("b",)),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", {"a": 2, "b": 2, "c": 2}, 4, ("a", "c")),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", SIZES, 4, ("a", "b")),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", {"x": 4, "y": 2}, 2, ("y",)),
    ],
)
def test_groups_in_every_form(groups, sizes, size, axes):
    line = (
        f"ROOT %r = f32[8]{{0}} all-reduce(%param), replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    )
    found = only(module(line))
    assert (found.size, found.axes(sizes)) == (size, axes)
    assert sorted(device for group in found.groups for device in group) == list(range(8))


def test_a_permute_to_oneself_spans_nothing():
    line = "%p = f32[8]{0} collective-permute(%param), source_target_pairs={{0,0},{1,2}}"
    assert only(module(line)).axes({"a": 2, "b": 2, "c": 2}) == ("b", "c")
    line = "%p = f32[8]{0} collective-permute(%param), source_target_pairs={{0,0},{1,1}}"
    assert only(module(line)).axes(SIZES) == ()


# What runs how often


REDUCE = "ROOT %r = f32[8]{{0}} all-reduce(%p{0}), replica_groups={{}}, to_apply=%add"


def computation(name: str, *lines: str) -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f"%{name} (p: f32[8]) -> f32[8] {{\n{body}}}\n"


ADD = "%add (x: f32[], y: f32[]) -> f32[] {\n  ROOT %s = f32[] add(%x, %y)\n}\n"
LOOP = "%{0} = (s32[], f32[8]{{0}}) while(%t), condition=%{1}, body=%{2}"
TRIPS = 'backend_config={{"known_induction_variable":{{"tuple_index":"0"}},"known_trip_count":{{"n":"{}"}}}}'


def test_loops_count_by_the_product_of_their_trips():
    inner = LOOP.format("inner", "never", "body") + ", " + TRIPS.format(3)
    outer = LOOP.format("outer", "never", "middle") + ", " + TRIPS.format(5)
    others = ADD + computation("body", REDUCE.format(1)) + computation("middle", inner, REDUCE.format(2))
    others += computation("never", "ROOT %c = pred[] compare(%i, %n), direction=LT")
    found = collectives(module(f"{outer}\n{REDUCE.format(3)}", others))
    assert [(c.times, c.exact) for c in found] == [(15, True), (5, True), (1, True)]


def test_what_is_not_known_is_marked():
    branches = "%b = f32[8]{0} conditional(%n, %x, %y), branch_computations={%one, %two}"
    old = "%o = f32[8]{0} conditional(%n, %x, %y), true_computation=%one, false_computation=%two"
    others = ADD + computation("one", REDUCE.format(1)) + computation("two", "ROOT %n = f32[8]{0} negate(%p)")
    found = collectives(module(f"{branches}\n{old}\n{LOOP.format('w', 'two', 'one')}", others))
    assert [(c.times, c.exact) for c in found] == [(1, False)] * 3


@pytest.mark.parametrize(
    "caller",
    [
        "%c = f32[8]{0} call(%param), to_apply=%one",
        "%c = f32[8]{0} fusion(%param), kind=kLoop, calls=%one",
        "%c = ((f32[8]{0}), f32[8]{0}) fusion-start(%param), kind=kCustom, calls=%one\n%d = f32[8]{0} fusion-done(%c)",
        "%c = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%param), calls=%one\n"
        "%u = ((f32[8]{0}), f32[8]{0}, u32[]) async-update(%c), calls=%one\n%d = f32[8]{0} async-done(%u), calls=%one",
        '%c = f32[8]{0} custom-call(%param), custom_call_target="f", called_computations={%one}',
    ],
)
def test_collectives_hidden_in_computations_that_are_called(caller):
    found = only(module(caller, ADD + computation("one", REDUCE.format(1))))
    assert (found.kind, found.result, found.times, found.exact) == ("all-reduce", 32, 1, True)


def test_a_computation_called_twice_counts_twice():
    calls = "%c = f32[8]{0} call(%param), to_apply=%one\n%d = f32[8]{0} call(%c), to_apply=%one"
    assert len(collectives(module(calls, ADD + computation("one", REDUCE.format(1))))) == 2


def test_names_that_look_like_collectives_are_none():
    lines = """
        %all-reduce.5 = f32[8]{0} add(%param, %all-gather.3), metadata={op_name="all-reduce(x)"}
        ROOT %get-tuple-element.3 = f32[8]{0} get-tuple-element(%all-to-all.1), index=0
    """
    assert collectives(module(lines)) == []


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        collectives("module @jit_f attributes {mhlo.num_partitions = 8 : i32} {\n}\n")


# Source lines


TABLES = """
    FileNames
    1 "/src/run model.py"
    2 "/src/layer.py"

    FunctionNames
    1 "main"
    2 "layer.<locals>.body"

    FileLocations
    1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=6 end_column=6}
    2 {file_name_id=2 function_name_id=2 line=12 end_line=12 column=8 end_column=8}

    StackFrames
    1 {file_location_id=1 parent_frame_id=FIRST}
    2 {file_location_id=2 parent_frame_id=SECOND}
    3 {file_location_id=2 parent_frame_id=THIRD}
"""


@pytest.mark.parametrize("shift", [0, 1])
def test_lines_from_the_tables(shift):
    """Numbers of parents as they are, and one too large, as XLA has written them."""
    tables = TABLES
    for number, name in enumerate(("FIRST", "SECOND", "THIRD")):
        tables = tables.replace(name, str(number + shift))
    line = (
        'ROOT %r = f32[8]{0} all-reduce(%param), replica_groups={}, metadata={op_name="jit(f)/psum" stack_frame_id=3}'
    )
    found = only(module(line, tables=tables))
    assert found.stack == ("/src/layer.py:12", "/src/run model.py:7")
    assert (found.source, found.op_name) == ("/src/layer.py:12", "jit(f)/psum")


def test_lines_in_the_metadata_and_none_at_all():
    metadata = 'metadata={op_name="psum" op_type="psum" source_file="/src/layer.py" source_line=12}'
    line = "ROOT %r = f32[8]{0} all-reduce(%param), replica_groups={}, to_apply=%add"
    assert only(module(f"{line}, {metadata}")).source == "/src/layer.py:12"
    bare = only(module(line))
    assert (bare.source, bare.stack, bare.op_name) == ("", (), "")


# Real programs


def compiled(
    function: Callable[..., Any], *inputs: tuple[tuple[int, ...], PartitionSpec], out: Any
) -> list[Collective]:
    mesh = definition.mesh(SIZES)
    specs = tuple(spec for _, spec in inputs)
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, spec)) for s, spec in inputs]
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return collectives(jax.jit(mapped).lower(*arrays).compile().as_text())


def test_every_kind_in_a_real_program():
    def function(x: jax.Array) -> tuple[jax.Array, ...]:
        y = lax.all_gather(x, "b", tiled=True)
        z = lax.psum_scatter(y, "a", tiled=True)
        moved = lax.all_to_all(y, "b", 1, 0, tiled=True)
        return z, moved, lax.ppermute(x, "a", [(0, 1), (1, 0)]), lax.psum(y * 2, ("a", "b"))

    out = (PartitionSpec("a"), PartitionSpec("b"), PartitionSpec("b"), PartitionSpec())
    found = compiled(function, ((16, 8), PartitionSpec("b")), out=out)
    assert sorted(map(sizes_of, found)) == [
        ("all-gather", "f32", 128, 512, ("b",), 384),
        ("all-reduce", "f32", 512, 512, ("a", "b"), 896),
        ("all-to-all", "f32", 512, 512, ("b",), 384),
        ("collective-permute", "f32", 128, 128, ("a",), 128),
        ("reduce-scatter", "f32", 512, 256, ("a",), 256),
    ]
    assert all(c.times == 1 and c.exact and c.source.rpartition(":")[0] == __file__ for c in found)
    assert len({c.source for c in found}) == 4, "each at its line; two share one"


def test_loops_and_branches_in_a_real_program():
    def function(x: jax.Array, n: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            x = lax.all_gather(lax.psum_scatter(x, "b", tiled=True), "b", tiled=True)
            return lax.scan(lambda x, _: (lax.psum(x, "a") * 0.5, None), x, None, length=3)[0], None

        x = lax.scan(layer, x, None, length=5)[0]
        x = lax.while_loop(lambda x: x[0] < 9, lambda x: lax.psum(x, ("a", "b")), x)
        return lax.cond(n[0] > 0, lambda x: lax.ppermute(x, "b", [(0, 1)]), lambda x: x * 2, x)

    found = compiled(function, ((8,), PartitionSpec()), ((1,), PartitionSpec()), out=PartitionSpec())
    assert sorted((c.kind, c.axes(SIZES), c.times, c.exact) for c in found) == [
        ("all-gather", ("b",), 5, True),
        ("all-reduce", ("a",), 15, True),
        ("all-reduce", ("a", "b"), 1, False),
        ("collective-permute", ("b",), 1, False),
        ("reduce-scatter", ("b",), 5, True),
    ]
    layers = [c for c in found if c.kind == "all-gather"]
    assert len(layers[0].stack) > 1, "the line in the layer, and the line that calls it"


def test_what_the_compiler_adds_is_found():
    """A split product that the compiler reduces by itself, and a mesh axis of which it uses a part."""
    mesh = definition.mesh({"x": 8})
    untyped = jax.sharding.Mesh(mesh.devices, ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (NamedSharding(untyped, PartitionSpec(*spec)) for spec in (("x",), ()))

    def function(x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x.reshape(4, 2, 4).sum(1), whole)

    text = jax.jit(function).lower(jax.ShapeDtypeStruct((32,), jnp.float32, sharding=split)).compile().as_text()
    found = {(c.kind, c.size, c.result): c for c in collectives(text)}
    assert set(found) == {("all-reduce", 2, 16), ("all-gather", 4, 64)}
    assert found["all-reduce", 2, 16].groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert sorted(map(sorted, found["all-gather", 4, 64].groups)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
