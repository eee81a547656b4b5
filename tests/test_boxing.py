"""Boxing: every change of signature gives the right values, by the collectives and bytes that the table names."""

import functools
import heapq
import itertools
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import definition
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgpt.errors import UserError
from jaxgpt.sharding.boxing import cost, pad, path, to_sbp
from jaxgpt.sharding.hlo import collectives
from jaxgpt.sharding.sbp import B, P, S, Signature, sbp

pytestmark = pytest.mark.core

PLACES = (S(0), S(1), B, P)
SHAPE = (8, 16)
BYTES = 8 * 16 * 4
COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "reduce-scatter")
COMPILER = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner", "xla_backend_optimization_level": 0}
"""Tests compile pairs together that have nothing to do with each other: XLA must not make one all-reduce of theirs."""
Pair = tuple[Signature, Signature]


class Found(NamedTuple):
    """A collective as a compiled program has it, or as a path says."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    operand: int
    result: int
    received: Fraction


def stated(source: Signature, target: Signature, sizes: dict[str, int]) -> list[Found]:
    steps = path(source, target, SHAPE, 4, sizes)
    costs = [(step.axis, step.cost) for step in steps if step.cost.kind in COLLECTIVES]
    return [Found(c.kind, (axis,), "f32", c.operand, c.result, c.received) for axis, c in costs]


def prove(pairs: Iterable[Pair], mesh: Mesh) -> None:
    """Compiles all pairs as one program, each on an array of its own; compares its collectives, pair by pair, with
    those of the stated path, and every device's result with the definition."""
    pairs, sizes = list(pairs), dict(mesh.shape)
    rng = np.random.default_rng(0)
    tensors = [rng.integers(-99, 99, SHAPE).astype(np.float32) for _ in pairs]
    arrays = [definition.put(t, source, mesh, rng) for t, (source, _) in zip(tensors, pairs, strict=True)]

    def change(arrays: list[jax.Array]) -> list[jax.Array]:
        results = []
        for number, (array, (_, target)) in enumerate(zip(arrays, pairs, strict=True)):
            with jax.named_scope(f"pair{number}_"):
                results.append(to_sbp(array, target))
        return results

    compiled = jax.jit(change).lower(arrays).compile(COMPILER)
    found = collectives(compiled.as_text())
    assert all("pair" in c.op_name and c.times == 1 and c.exact for c in found)
    for number, ((source, target), tensor, result) in enumerate(zip(pairs, tensors, compiled(arrays), strict=True)):
        mine = [c for c in found if f"pair{number}_" in c.op_name]
        emitted = [Found(c.kind, c.axes(sizes), c.dtype, c.operand, c.result, c.received) for c in mine]
        assert emitted == stated(source, target, sizes), f"{source} -> {target}"
        assert sbp(result) == target
        np.testing.assert_array_equal(definition.whole(result, target, mesh), tensor, f"{source} -> {target}")


# One axis


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_change_on_one_axis_is_the_collective_of_the_table(size):
    signatures = [Signature({"tensor": place}) for place in PLACES]
    prove(itertools.product(signatures, signatures), definition.mesh({"tensor": size}))


@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_table(p):
    """The table of OneFlow and of the bytes received, written out once more, by hand."""
    t, part = BYTES, BYTES // p
    table = {
        (S(0), S(0)): ("none", part, part, 0, 0),
        (S(0), S(1)): ("all-to-all", part, part, (p - 1) * t / p**2, (p - 1) / p * t),
        (S(1), B): ("all-gather", part, t, (p - 1) * t / p, (p - 1) * t),
        (S(1), P): ("pad", part, t, 0, math.inf),
        (B, S(1)): ("slice", t, part, 0, 1),
        (B, B): ("none", t, t, 0, 0),
        (B, P): ("zeros", t, t, 0, 8 * p * t),
        (P, S(0)): ("reduce-scatter", t, part, (p - 1) * t / p, (p - 1) * t),
        (P, B): ("all-reduce", t, t, 2 * (p - 1) * t / p, 2 * (p - 1) * t),
        (P, P): ("none", t, t, 0, 0),
    }
    for (source, target), expected in table.items():
        c = cost(source, target, t, p)
        assert (c.kind, c.operand, c.result, c.received, c.oneflow) == expected
        steps = path(Signature({"x": source}), Signature({"x": target}), SHAPE, 4, {"x": p})
        assert [step.cost for step in steps] == [c] * (source != target), "one step at most"


def test_an_axis_of_one_device_needs_nothing():
    mesh = definition.mesh({"data": 2, "tensor": 1})
    signatures = [Signature({"data": S(1), "tensor": place}) for place in PLACES]
    prove(itertools.product(signatures, signatures), mesh)
    assert all(not stated(a, b, dict(mesh.shape)) for a, b in itertools.product(signatures, signatures))
    assert cost(P, B, BYTES, 1).kind == "none"


def test_zeros_are_held_by_all_but_the_first():
    mesh = definition.mesh({"tensor": 4})
    x = jnp.ones(SHAPE)
    partial = to_sbp(jax.device_put(x, NamedSharding(mesh, PartitionSpec())), {"tensor": P})
    assert [float(tensor.sum()) for tensor in definition.held_by(partial, mesh).values()] == [x.size, 0, 0, 0]


# Two axes


def two_axes() -> list[Signature]:
    """All signatures on two axes, and one with the axes in the other order of cutting."""
    ordered = [Signature({"a": a, "b": b}) for a, b in itertools.product(PLACES, PLACES)]
    return [*ordered, Signature({"b": S(0), "a": S(0)}, ("a", "b"))]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4)], ids=["2x2", "2x4"])
@pytest.mark.parametrize("source", two_axes(), ids=str)
def test_every_change_on_two_axes_is_the_stated_sequence(source, sizes):
    prove([(source, target) for target in two_axes()], definition.mesh({"a": sizes[0], "b": sizes[1]}))


@functools.cache
def cheapest(
    source: Signature, moving: tuple[str, ...], partial: tuple[str, ...], shape: tuple[int, ...]
) -> dict[Signature, tuple[Fraction, int]]:
    """Signature -> fewest bytes received and steps to it, found independently, over all legal steps whatever of the
    moving axes by which only those in partial become P."""
    sizes, best, tie = {"a": 2, "b": 4}, {}, itertools.count(1)
    queue = [(Fraction(0), 0, 0, source)]
    while queue:
        received, steps, _, here = heapq.heappop(queue)
        if here in best:
            continue
        best[here] = (received, steps)
        for axis, place in itertools.product(moving, [*(S(dim) for dim in range(len(shape))), B, P]):
            dim = here[axis].dim if isinstance(here[axis], S) else None
            if place == here[axis] or (dim is not None and here.split(dim)[-1] != axis):
                continue
            there = here.change(axis, place)
            if (place is P and axis not in partial) or not legal(there, shape):
                continue
            parts = math.prod(sizes[a] for a in sizes if a != axis and isinstance(here[a], S))
            c = cost(here[axis], place, math.prod(shape) * 4 // parts, sizes[axis])
            heapq.heappush(queue, (received + c.received, steps + 1, next(tie), there))
    return best


def legal(signature: Signature, shape: tuple[int, ...]) -> bool:
    parts = {dim: math.prod({"a": 2, "b": 4}[axis] for axis in signature.split(dim)) for dim in range(len(shape))}
    return all(shape[dim] % count == 0 for dim, count in parts.items())


@pytest.mark.parametrize("shape", [(8, 16), (8, 3)], ids=str)
def test_no_sequence_of_steps_moves_fewer_bytes(shape):
    """Also where one dimension cannot be split, so that the way round is closed."""
    signatures = [signature for signature in two_axes() if legal(signature, shape)]
    for source, target in itertools.product(signatures, signatures):
        changed = [axis for axis in "ab" if source[axis] != target[axis]]
        in_the_way = any(source.split(dim) != target.split(dim) and len(source.split(dim)) == 2 for dim in (0, 1))
        swapped = any(len(target.split(dim)) == 2 and source.split(dim) != target.split(dim) for dim in (0, 1))
        moving = ("a", "b") if in_the_way or swapped else tuple(changed)
        steps = path(source, target, shape, 4, {"a": 2, "b": 4})
        best = cheapest(source, moving, tuple(sorted(target.partial)), shape)[target]
        assert (sum(step.cost.received for step in steps), len(steps)) == best, f"{source} -> {target}"
        assert [source, *(step.after for step in steps)][-1] == target


def test_partial_sums_are_reduced_before_anything_is_gathered_and_into_parts():
    sizes = {"a": 2, "b": 4}

    def said(source: dict, target: dict) -> list[tuple[str, str]]:
        return [(s.axis, s.cost.kind) for s in path(Signature(source), Signature(target), SHAPE, 4, sizes)]

    assert said({"a": P, "b": S(0)}, {}) == [("a", "all-reduce"), ("b", "all-gather")]
    assert said({"a": P, "b": P}, {"a": S(1), "b": S(0)}) == [("a", "reduce-scatter"), ("b", "reduce-scatter")]
    assert sorted(said({"a": P, "b": P}, {})) == [("a", "all-reduce"), ("b", "all-gather"), ("b", "reduce-scatter")]
    assert said({"a": P, "b": B}, {"a": B, "b": S(0)}) == [("b", "slice"), ("a", "all-reduce")]


def test_a_step_says_what_it_does():
    (step,) = path(Signature({"tensor": S(0)}), Signature({"tensor": B}), SHAPE, 4, {"data": 2, "tensor": 4})
    assert str(step) == "tensor: S(0) -> B, all-gather, 384 B received"
    assert step.after == Signature({})


def test_other_axes_are_left_as_they_are():
    """A change on one of three axes is one step, however the others split."""
    sizes = {"a": 2, "b": 2, "c": 2}
    for fixed, change in itertools.product(itertools.product(PLACES, PLACES), itertools.permutations((S(2), B, P), 2)):
        source, target = (Signature({"a": fixed[0], "b": fixed[1], "c": place}) for place in change)
        assert [step.axis for step in path(source, target, (8, 8, 8), 4, sizes)] == ["c"]


def test_three_axes_change_together():
    mesh = definition.mesh({"a": 2, "b": 2, "c": 2})
    ends = [{"a": P, "b": S(0), "c": S(1)}, {"a": S(0), "b": S(0), "c": S(0)}, {"c": S(0), "b": P, "a": S(0)}]
    prove(itertools.product(map(Signature, ends), map(Signature, [*ends, {}])), mesh)


# Gradients, types, where it may be called


@pytest.mark.parametrize("source", [Signature({"a": a, "b": b}) for a, b in itertools.product(PLACES, PLACES)], ids=str)
def test_the_gradient_is_that_of_the_identity(source):
    """Through every change at once: each result is added with a weight of its own, and no weight is lost or doubled."""
    mesh = definition.mesh({"a": 2, "b": 2})
    x = np.arange(16.0, dtype=np.float32).reshape(4, 4)

    def loss(x: jax.Array) -> jax.Array:
        here = to_sbp(x, source)
        ways = [to_sbp(to_sbp(here, target), {}) for target in two_axes()[::3]]
        return sum(jnp.sum((number + 1) * way * x) for number, way in enumerate(ways))

    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss))(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(gradient), 2 * 21 * x)


def test_the_gradient_moves_no_more_than_it_must():
    """B -> S back is an all-gather, not the all-reduce of padded parts that JAX would make of it."""
    mesh = definition.mesh({"tensor": 4})

    def kinds(source: Signature, target: Signature) -> list[str]:
        def backward(x: jax.Array) -> jax.Array:
            y, vjp = jax.vjp(lambda x: to_sbp(x, target), x)
            return vjp(y)[0]

        x = definition.put(np.ones(SHAPE, np.float32), source, mesh, np.random.default_rng(0))
        return [c.kind for c in collectives(jax.jit(backward).lower(x).compile().as_text())]

    assert kinds(Signature({}), Signature({"tensor": S(0)})) == ["all-gather"]
    assert kinds(Signature({"tensor": S(0)}), Signature({"tensor": S(1)})) == ["all-to-all"] * 2


def test_inside_a_shard_map_the_axes_left_to_types_are_boxed():
    mesh = definition.mesh({"data": 2, "tensor": 4})
    x = np.random.default_rng(0).integers(-9, 9, (8, 16)).astype(np.float32)

    def local(x: jax.Array) -> jax.Array:
        assert sbp(x) == Signature({"tensor": S(1)})
        gathered = to_sbp(x * x, {})
        assert jax.typeof(gathered).manual_axis_type.varying == {"data"}, "values still differ over data"
        moved = to_sbp(gathered, {"tensor": S(0)})
        assert sbp(moved) == Signature({"tensor": S(0)})
        return jax.lax.psum(jnp.sum(to_sbp(moved, {})), "data")

    data = PartitionSpec("data")
    function = jax.shard_map(local, mesh=mesh, in_specs=data, out_specs=PartitionSpec(), axis_names={"data"})
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "tensor")))
    loss, gradient = jax.jit(jax.value_and_grad(function))(placed)
    assert float(loss) == (x * x).sum()
    np.testing.assert_array_equal(np.asarray(gradient), 2 * x)


def test_every_number_type_is_boxed():
    mesh = definition.mesh({"tensor": 4})
    for dtype in (np.int32, np.bool_, jnp.bfloat16):
        x = np.arange(64).reshape(8, 8).astype(dtype)
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("tensor")))
        np.testing.assert_array_equal(np.asarray(to_sbp(to_sbp(placed, {"tensor": S(1)}), {})), x)
    with pytest.raises(UserError, match="type bool: P on axis tensor is a sum"):
        to_sbp(jax.device_put(np.ones(8, np.bool_), NamedSharding(mesh, PartitionSpec())), {"tensor": P})


def test_integers_pass_through_a_differentiated_function():
    mesh = definition.mesh({"tensor": 2})
    tokens = jax.device_put(np.arange(4), NamedSharding(mesh, PartitionSpec("tensor")))

    def loss(w: jax.Array, tokens: jax.Array) -> jax.Array:
        return jnp.sum(w.at[to_sbp(tokens, {})].get(out_sharding=PartitionSpec()))

    with jax.set_mesh(mesh):
        gradient, nothing = jax.jit(jax.grad(loss, (0, 1), allow_int=True))(jnp.ones(6), tokens)
    assert gradient.tolist() == [1, 1, 1, 1, 0, 0]
    assert nothing.dtype == jax.dtypes.float0


# Refused, or padded


def place(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    return jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec))


def test_an_uneven_dimension_is_refused_in_one_line():
    mesh = definition.mesh({"data": 2, "tensor": 4})
    x = place((12, 10), PartitionSpec(), mesh)
    with pytest.raises(UserError) as caught:
        to_sbp(x, {"tensor": S(1)})
    assert str(caught.value) == (
        "tensor of shape [12, 10]: dimension 1 of size 10 does not divide over tensor=4; "
        "pad it to 12 (boxing.pad), or split another"
    )
    with pytest.raises(UserError, match="dimension 0 of size 12 does not divide over tensor=4 x data=2; pad it to 16"):
        to_sbp(x, {"tensor": S(0), "data": S(0)})
    with pytest.raises(UserError, match="does not divide"):
        path(Signature({}), Signature({"tensor": S(1)}), (12, 10), 4, dict(mesh.shape))


def test_padding_is_said_and_holds_zeros():
    mesh = definition.mesh({"data": 2, "tensor": 4})
    x = place((12, 10), PartitionSpec("data"), mesh)
    wanted = Signature({"data": S(0), "tensor": S(1)})
    padded = pad(x, wanted)
    assert padded.shape == (12, 12) and sbp(padded) == sbp(x)
    split = to_sbp(padded, wanted)
    assert {part.shape for part in definition.held_by(split, mesh).values()} == {(6, 3)}
    result = definition.whole(split, wanted, mesh)
    assert (result[:, :10] == 1).all() and (result[:, 10:] == 0).all()
    assert pad(split, wanted).shape == split.shape, "nothing to do"
    partial = to_sbp(x, {"data": S(0), "tensor": P})
    result = definition.whole(pad(partial, wanted), sbp(partial), mesh)
    assert (result[:, :10] == 1).all() and (result[:, 10:] == 0).all()


def test_a_split_dimension_is_not_padded():
    x = place((10,), PartitionSpec("data"), definition.mesh({"data": 2, "tensor": 4}))
    with pytest.raises(UserError, match=r"\[10\]: dimension 0 is split and cannot be padded to 16; make it B on data"):
        pad(x, {"data": S(0), "tensor": S(0)})


def test_arrays_without_a_typed_mesh_are_refused():
    with pytest.raises(UserError, match="lies on no mesh; give the array a NamedSharding"):
        to_sbp(jnp.ones(8), {})
    auto = Mesh(np.array(jax.devices()[:2]), ("tensor",), axis_types=(AxisType.Auto,))
    with pytest.raises(UserError, match="mesh axis tensor is Auto"):
        to_sbp(place((8,), PartitionSpec(), auto), {"tensor": S(0)})


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ({"pipe": S(0)}, r"names axis 'pipe'; the mesh has data, tensor"),
        ({"tensor": S(2)}, r"S\(2\) on axis tensor splits a dimension that it lacks; it has dimensions 0 to 1"),
        ({"tensor": S(-1)}, r"S\(-1\) on axis tensor"),
    ],
)
def test_signatures_that_the_tensor_cannot_have(signature, message):
    mesh = definition.mesh({"data": 2, "tensor": 4})
    with pytest.raises(UserError, match=message) as caught:
        to_sbp(place((8, 8), PartitionSpec(), mesh), signature)
    assert "\n" not in str(caught.value)


def test_padding_for_what_is_not_there_is_refused():
    x = place((10, 4), PartitionSpec(), definition.mesh({"data": 2, "tensor": 4}))
    with pytest.raises(UserError, match="names axis 'expert'; the mesh has"):
        pad(x, {"expert": S(0)})
    for dim in (2, -1):
        with pytest.raises(UserError, match="splits a dimension that it lacks; it has dimensions 0 to 1"):
            pad(x, {"data": S(dim)})
