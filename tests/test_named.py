"""A wrong or ambiguous layout of named dimensions is an error while a program is traced, at the line that has it."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxgpt.sharding import named

pytestmark = pytest.mark.core

RULES = {"batch": None, "seq": None, "embed": None, "mlp": "tensor"}
WEIGHT = jnp.ones((16, 32))


def traced(function: Callable[..., Any], *specs: PartitionSpec) -> Any:
    """What a function of arrays [4, 8, 16] that lie so is traced to."""
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Explicit,), devices=jax.devices()[:2])
    arrays = [jax.ShapeDtypeStruct((4, 8, 16), jnp.float32, sharding=NamedSharding(mesh, each)) for each in specs]
    with jax.set_mesh(mesh), named.layout(RULES):
        return jax.eval_shape(function, *arrays)


LAST, SECOND = PartitionSpec(None, None, "tensor"), PartitionSpec(None, "tensor")


@pytest.mark.parametrize(
    ("function", "specs", "kind", "said"),
    [
        (lambda x, y: x + y, (LAST, SECOND), Exception, "f32[4,8,16@tensor], f32[4,8@tensor,16]"),
        (lambda x, y: jnp.einsum("bse,bse->bs", x, y), (LAST, LAST), Exception, "ambiguous"),
        (lambda x: named.relayout(x, "batch seq embd"), (LAST,), KeyError, "no layout names embd"),
        (lambda x: named.relayout(x, "batch mlp mlp"), (LAST,), Exception, "`tensor`"),
        (lambda x: named.relayout(x, "batch seq"), (LAST,), ValueError, "names 2 dimensions of 3"),
        (lambda x: named.reshape(x, (4, 128), "batch seq mlp"), (SECOND,), ValueError, "names 3 dimensions of 2"),
        (lambda x: named.linear(x, WEIGHT, None, "batch mlp"), (SECOND,), ValueError, "names 2 dimensions of 3"),
    ],
    ids=["sum", "product", "a name", "an axis twice", "too few", "too many", "a product's"],
)
def test_a_wrong_layout_is_an_error_at_its_line(
    function: Callable[..., Any], specs: tuple[PartitionSpec, ...], kind: type[Exception], said: str
):
    with pytest.raises(kind) as raised:
        traced(function, *specs)
    assert said in str(raised.value)
    frames = traceback.extract_tb(raised.value.__traceback__)
    line = function.__code__.co_firstlineno
    assert any(Path(frame.filename) == Path(__file__) and frame.lineno == line for frame in frames)


def test_right_ones_are_none():
    out = traced(lambda x: named.linear(x, WEIGHT, None, "batch seq mlp"), SECOND)
    assert out.shape == (4, 8, 32)
    assert out.sharding.spec == LAST
