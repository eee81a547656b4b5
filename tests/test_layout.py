"""The layout table: ZeRO's stages, what a user may change of it, and what is refused."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P
from tiny import GPT, LLAMA, batches, run_config

from jaxgpt.errors import UserError
from jaxgpt.model.parameters import parameters
from jaxgpt.sharding.layout import Layout, split_axes
from jaxgpt.sharding.mesh import check, parse
from jaxgpt.sharding.rows import overrides, rows
from jaxgpt.training import parity

pytestmark = pytest.mark.core

EVERYTHING = "data=2,fsdp=2,context=2,tensor=2"


def layout(mesh: str = EVERYTHING, **fields: object) -> Layout:
    return Layout.of(run_config(LLAMA, **fields), parse(mesh))


def test_layouts_of_parameters_are_megatrons_and_fsdps() -> None:
    found = {n: layout().stored(p.dims) for n, p in parameters(LLAMA).items()}
    assert found["embedding.token.weight"] == P("tensor", "fsdp")
    assert found["blocks.attention.query.weight"] == P(None, "fsdp", "tensor", None)
    assert found["blocks.attention.out.weight"] == P(None, "tensor", None, "fsdp")
    assert found["blocks.mlp.up.weight"] == P(None, "fsdp", "tensor")
    assert found["blocks.mlp.down.weight"] == P(None, "tensor", "fsdp")
    assert found["blocks.norm1.scale"] == P(None, None)


def test_on_axes_of_one_device_nothing_is_split() -> None:
    one = layout("data=1")
    assert not any(split_axes(one.stored(p.dims)) for p in parameters(LLAMA).values())
    assert one.axes == ()
    assert one.sequence is None


@pytest.mark.parametrize(
    ("zero", "rest", "accumulated", "used"),
    [(0, 1, 1, 1), (1, 2, 1, 1), (2, 2, 2, 1), (3, 2, 2, 2)],
)
def test_the_stages_of_zero_split_ever_more_over_data(zero: int, rest: int, accumulated: int, used: int) -> None:
    table = layout(zero=zero).rows
    order = ("fsdp", "data")
    assert (table.rest, table.accumulated, table.used) == (order[:rest], order[:accumulated], order[:used])


def test_sequence_parallelism_is_a_row() -> None:
    assert layout().rows.activations["seq"] == ("context",)
    assert layout(sequence_parallel=True).rows.activations["seq"] == ("context", "tensor")
    assert layout(sequence_parallel=True).rows.activations["length"] == ("context",)
    assert layout(layout="seq=tensor") == layout(sequence_parallel=True)


def test_fewer_key_value_heads_than_tensor_lie_whole_and_are_computed_once_a_device() -> None:
    many = layout("tensor=8")
    assert many.kv_heads == 8
    assert many.rows.parameters["kv_heads"] == ()
    assert many.typed()["kv_heads"] == "tensor"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mlp", "'mlp' is not dimension=axes"),
        ("width=tensor", "'width' is not a dimension; those that can be changed are vocab, heads, mlp, seq, embed"),
        (
            "layers=none",
            "'layers' cannot be changed by hand; those that can be changed are vocab, heads, mlp, seq, embed",
        ),
        ("mlp=none,mlp=tensor", "mlp is given twice"),
        ("mlp=tensors", "'tensors' is not a mesh axis"),
        ("mlp=tensor+tensor", "mlp cannot lie twice on one axis"),
        ("mlp=data", "mlp cannot lie on data; allowed are none or tensor"),
        ("embed=data+fsdp", "embed cannot lie on data+fsdp; allowed are none or fsdp or data or fsdp+data"),
    ],
)
def test_a_row_that_cannot_be_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        overrides(text)
    assert str(caught.value).startswith(f"--layout {text}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_row_changed_by_hand_changes_what_must_divide() -> None:
    odd = run_config(dataclasses.replace(GPT, heads=2))
    with pytest.raises(UserError, match="tensor=4 must divide --heads 2"):
        check(odd, parse("tensor=4"))
    assert check(dataclasses.replace(odd, layout="heads=none"), parse("tensor=4")) == []
    assert rows(dataclasses.replace(odd, layout="heads=none"), parse("tensor=4")).parameters["kv_heads"] == ()


@pytest.mark.parametrize(
    ("mesh", "text"), [("tensor=4", "mlp=none,vocab=none,seq=tensor"), ("data=2,tensor=2", "heads=none,embed=data")]
)
def test_a_row_changed_by_hand_changes_no_number(mesh: str, text: str) -> None:
    config = run_config(dataclasses.replace(LLAMA, layers=1, dropout=0.1))
    given = batches(config, 2)
    one = parity.trace(config, "data=1", given)
    other = parity.trace(dataclasses.replace(config, layout=text), mesh, given)
    assert not [d for d in parity.differences(one, other) if not d.holds]
