"""SBP: signatures, of PartitionSpecs and of arrays."""

from typing import Any

import definition
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgpt.errors import UserError
from jaxgpt.sharding.sbp import B, P, S, Signature, check, padded_shape, sbp

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (PartitionSpec(), "[data: B, fsdp: B, tensor: B]"),
        (PartitionSpec("data", None, "tensor"), "[data: S(0), fsdp: B, tensor: S(2)]"),
        (PartitionSpec(("data", "fsdp")), "[data: S(0), fsdp: S(0), tensor: B]"),
        (PartitionSpec(("tensor", "data"), "fsdp"), "[tensor: S(0), fsdp: S(1), data: S(0)]"),
        (PartitionSpec(None, "fsdp", unreduced={"data", "tensor"}), "[data: P, fsdp: S(1), tensor: P]"),
    ],
)
def test_a_spec_as_signature_and_back(spec, text):
    signature = Signature.from_spec(spec, ("data", "fsdp", "tensor"))
    assert str(signature) == text
    assert signature.spec() == spec
    assert Signature.from_spec(signature.spec(), ()) == signature


def test_reduced_is_b_and_can_be_said():
    spec = PartitionSpec("data", reduced={"tensor"})
    signature = Signature.from_spec(spec, ("data", "tensor"))
    assert signature["tensor"] is B
    assert signature.spec(reduced=("tensor",)) == spec


def test_b_is_what_is_not_named_and_the_order_of_cutting_counts():
    both = Signature({"a": S(0), "b": S(0)})
    assert Signature({"a": S(0), "b": B}) == Signature({"a": S(0)}) != Signature({"a": S(1)})
    assert both != Signature({"b": S(0), "a": S(0)})
    assert Signature({"a": S(0), "b": S(1)}) == Signature({"b": S(1), "a": S(0)})
    assert len({both, Signature({"b": S(0), "a": S(0)}), Signature(both), Signature({**both, "c": B})}) == 2
    assert both["c"] is B and "c" not in both and both.split(0) == ("a", "b")


def test_an_axis_that_comes_to_a_dimension_is_its_innermost():
    signature = Signature({"a": S(0), "b": S(0), "c": P})
    assert signature.change("a", S(1)).change("a", S(0)).split(0) == ("b", "a")
    assert str(signature.change("a", B).change("a", S(0))) == "[b: S(0), a: S(0), c: P]"
    assert signature.change("c", S(0)).spec() == PartitionSpec(("a", "b", "c"))
    assert signature.on(("c", "b")) == Signature({"b": S(0), "c": P})


@pytest.mark.parametrize("signature", [{}, {"a": S(1)}, {"b": S(0), "a": S(0)}, {"a": P, "b": S(1)}, {"a": P, "b": P}])
def test_the_signature_of_an_array_and_inside_jit(signature):
    mesh = definition.mesh({"a": 2, "b": 4})
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    array = definition.put(x, Signature(signature), mesh, np.random.default_rng(0))
    assert sbp(array) == sbp(array.sharding) == Signature(signature)

    def inside(x: jax.Array) -> jax.Array:
        assert sbp(x + x) == Signature(signature)
        return x + x

    jax.jit(inside).lower(array)


def test_jax_reads_our_layouts_as_we_do():
    """An array cut by the definition is, to JAX, the same logical tensor."""
    mesh = definition.mesh({"a": 2, "b": 4})
    x = np.arange(128.0, dtype=np.float32).reshape(8, 16)
    for places in ({"a": S(0), "b": S(1)}, {"a": S(0), "b": S(0)}, {"b": S(0), "a": S(0)}, {"b": S(1)}):
        array = definition.put(x, Signature(places), mesh, np.random.default_rng(0))
        np.testing.assert_array_equal(np.asarray(array), x)
        np.testing.assert_array_equal(definition.whole(array, Signature(places), mesh), x)


def test_inside_a_shard_map_only_typed_axes_have_a_signature():
    mesh = definition.mesh({"data": 2, "tensor": 4})

    def local(x: jax.Array) -> jax.Array:
        assert str(sbp(x)) == "[tensor: S(1)]"
        return x

    data = PartitionSpec("data")
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data", "tensor")))
    jax.jit(jax.shard_map(local, mesh=mesh, in_specs=data, out_specs=data, axis_names={"data"})).lower(x)


def test_layouts_without_a_signature_are_refused():
    auto = Mesh(np.array(jax.devices()[:2]), ("tensor",), axis_types=(AxisType.Auto,))
    x = jax.device_put(np.ones(8), NamedSharding(auto, PartitionSpec("tensor")))
    assert sbp(x) == Signature({"tensor": S(0)}), "an array itself knows how it lies"
    with pytest.raises(UserError, match="mesh axis tensor is Auto: inside jit only the compiler knows"):
        jax.jit(lambda x: sbp(x) and x).lower(x)
    assert sbp(jnp.ones(8)) == Signature({})
    assert jax.jit(lambda x: x * len(sbp(x)))(jnp.ones(8)).sum() == 0, "no mesh, no axes"
    with pytest.raises(UserError, match="a layout of ndarray lies on no mesh"):
        sbp(np.ones(8))
    with pytest.raises(UserError, match="unconstrained"):
        Signature.from_spec(PartitionSpec(PartitionSpec.UNCONSTRAINED), ("tensor",))


def test_what_a_tensor_cannot_have():
    sizes = {"a": 2, "b": 4}
    check(Signature({"a": S(0), "b": S(1)}), (6, 8), sizes)
    check(Signature({"a": P}), (), sizes)
    for places, shape, message in (
        ({"a": S(0), "b": S(0)}, (12, 8), r"wte of shape \[12, 8\]: dimension 0 of size 12 .* a=2 x b=4; pad it to 16"),
        ({"b": S(1)}, (8,), r"wte of shape \[8\]: S\(1\) on axis b splits a dimension that it lacks"),
        ({"a": S(0)}, (), "it has no dimensions"),
        ({"d": B}, (8,), "names axis 'd'; the mesh has a, b"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            check(Signature(places), shape, sizes, name="wte")
        assert "\n" not in str(caught.value)
    assert padded_shape((12, 10, 3), Signature({"a": S(0), "b": S(0)}), sizes) == (16, 10, 3)


@pytest.mark.parametrize("place", ["S(0)", "P", 0, None, S])
def test_what_is_no_place_is_refused_and_not_taken_for_b(place: Any):
    with pytest.raises(UserError, match=r"axis data: .* is not a place; give S\(dim\), dim a whole number, or B or P"):
        Signature({"tensor": S(0), "data": place})
