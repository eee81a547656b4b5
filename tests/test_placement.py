"""Which layers lie on which stage, in which rows, how the batch is cut, and how a state moves between placements."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from quickly import placed
from tiny import run_config

from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.errors import UserError
from jaxgpt.model.parameters import parameters
from jaxgpt.pipeline.microbatches import FILL, micro_batch
from jaxgpt.pipeline.placement import EMPTY, Placement, place
from jaxgpt.sharding.mesh import parse
from jaxgpt.training import checkpoint, parity
from jaxgpt.training.program import Program
from jaxgpt.training.resume import flatten, logical_shapes, stored_rows, unflatten

pytestmark = pytest.mark.core

# Layers on stages


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "parts"),
    [
        (7, 2, 1, (3, 4)),
        (30, 4, 1, (7, 7, 8, 8)),
        (8, 8, 1, (1,) * 8),
        (32, 8, 1, (4,) * 8),
        (7, 2, 3, (1, 1, 1, 1, 1, 2)),
        (5, 1, 1, (5,)),
    ],
)
def test_auto_is_as_even_as_can_be_and_the_longer_parts_come_last(
    layers: int, stages: int, chunks: int, parts: tuple[int, ...]
) -> None:
    assert place(layers, stages, chunks, "auto").parts == parts


@pytest.mark.parametrize("layers", range(1, 33))
def test_every_layer_has_one_row_on_the_stage_of_its_part(layers: int) -> None:
    for stages, chunks in ((1, 1), (2, 1), (3, 1), (8, 1), (2, 2), (4, 3)):
        if layers < stages * chunks:
            continue
        found = place(layers, stages, chunks, "auto")
        assert found.layers == layers
        assert found.rows.shape == (stages, chunks, found.longest)
        assert sorted(row for row in found.rows.ravel().tolist() if row != EMPTY) == list(range(layers))
        following = [found.rows[part % stages, part // stages] for part in range(stages * chunks)]
        assert [int(row) for part in following for row in part if row != EMPTY] == list(range(layers))
        assert found.full == (EMPTY not in found.rows)
        assert max(found.parts) - min(found.parts) <= 1


def test_rows_of_uneven_and_of_interleaved_stages() -> None:
    assert place(5, 2, 1, "3, 2") == Placement(2, 1, (3, 2))
    assert place(5, 2, 1, "3,2").order == (0, 1, 2, 3, 4, EMPTY)
    assert place(4, 2, 2, "auto").order == (0, 2, 1, 3)
    assert place(8, 4, 1, "2,2,2,2").order is None
    assert place(8, 4, 1, "auto").order is None


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "wanted", "says"),
    [
        (3, 4, 1, "auto", "--layers 3: must be at least the 4 parts of pipe=4"),
        (5, 2, 3, "auto", "--virtual-stages 3: pipe=2 x 3 are 6 parts, more than --layers 5; give at most 2"),
        (3, 2, 3, "auto", "--layers 3: must be at least the 6 parts of pipe=2 x --virtual-stages 3"),
        (30, 4, 1, "7,8,8", "--stages 7,8,8: must name the 4 parts of pipe=4; for example 7,7,8,8"),
        (30, 4, 1, "7,8,8,8", "--stages 7,8,8,8: must sum to --layers 30, not to 31"),
        (30, 4, 1, "15,15,0,0", "--stages 15,15,0,0: must be"),
        (30, 4, 1, "7,8,8,-7", "--stages 7,8,8,-7: must be"),
        (30, 4, 1, "7,8,8,7.0", "--stages 7,8,8,7.0: must be"),
        (30, 4, 1, "7,8,8,7,", "--stages 7,8,8,7,: must be"),
        (30, 4, 1, "even", '--stages even: must be "auto", or the layers of each stage, each at least 1, "7,8,8,7"'),
        (30, 4, 1, "", "--stages : must be"),
    ],
)
def test_placements_that_are_refused(layers: int, stages: int, chunks: int, wanted: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        place(layers, stages, chunks, wanted)
    assert says in str(caught.value)


# Samples in microbatches


@pytest.mark.parametrize(
    ("mesh", "fields", "rows"),
    [
        ("data=4", {"global_batch": 32}, 8),  # without a pipeline, all of a device's share
        ("pipe=4", {"global_batch": 32}, 2),  # as many microbatches as FILL times the stages
        ("pipe=2,data=2", {"global_batch": 32}, 2),
        ("pipe=8", {"global_batch": 6}, 1),  # no more than there are samples
        ("pipe=2", {"global_batch": 28}, 4),  # 7 of 4: the most up to 8 that divide
        ("pipe=2", {"global_batch": 14, "schedule": "interleaved"}, 7),  # 2 of 7: 7 of 2 are no multiple of the stages
        ("pipe=4", {"global_batch": 6, "schedule": "interleaved"}, 1),  # no number fits: the mesh refuses it
        ("pipe=4", {"global_batch": 32, "micro_batch": 16}, 16),  # what the user says
        ("data=8", {"global_batch": 4}, 1),
    ],
)
def test_microbatches_are_chosen(mesh: str, fields: dict[str, Any], rows: int) -> None:
    assert FILL == 4
    assert micro_batch(RunConfig(**fields), parse(mesh)) == rows


# A state from one placement to another

MODEL = ModelConfig(layers=7, width=16, heads=2, vocab=50, seq=8)
PLACEMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one device": ("data=1", {}),
    "uneven": ("pipe=2", {"stages": "5,2"}),
    "interleaved": ("pipe=2,fsdp=2", {"schedule": "interleaved", "virtual_stages": 3}),
    "many stages": ("pipe=4,tensor=2", {}),
}


def on(placement: str) -> Program:
    mesh, fields = PLACEMENTS[placement]
    return parity.program(run_config(MODEL, **fields), mesh)


def drawn() -> dict[str, Any]:
    """A state on one device, every value of it its own; padding is zero."""
    rng = np.random.default_rng(0)

    def each(shape: tuple[int, ...], logical: tuple[int, ...]) -> np.ndarray:
        array = np.zeros(shape, np.float32)
        array[tuple(slice(n) for n in logical)] = rng.normal(size=logical)
        return array

    table = parameters(MODEL)
    kinds = {k: {n: each(p.shape, p.logical) for n, p in table.items()} for k in ("params", "mu", "nu")}
    return kinds | {"step": np.int32(7)}


def in_order(program: Program, state: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: program.in_order(name.partition("/")[2], np.asarray(array)) for name, array in flatten(state).items()}


def save(folder: Path, program: Program, state: dict[str, Any]) -> None:
    writer = checkpoint.Writer(folder, 1)
    writer.save(7, flatten(state), logical_shapes(state, program.logical), {}, stored_rows(state, program.rows))
    writer.close()


def opened(folder: Path, program: Program) -> dict[str, Any]:
    targets = program.targets()
    shapes, rows = logical_shapes(targets, program.logical), stored_rows(targets, program.rows)
    return unflatten(checkpoint.restore(folder, 7, flatten(targets), shapes, rows))


@pytest.mark.parametrize("first", PLACEMENTS)
def test_a_checkpoint_opens_on_every_placement_bit_for_bit(first: str, tmp_path: Path) -> None:
    wanted = flatten(drawn())
    program = on(first)
    save(tmp_path, program, placed(program, drawn()))
    for other in PLACEMENTS:
        moved = on(other)
        state = opened(tmp_path, moved)
        found = in_order(moved, state)
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            assert found[name].tobytes() == np.asarray(array).tobytes(), f"{first} to {other}: {name}"
        jax.tree.map(np.testing.assert_array_equal, state, placed(moved, drawn()))  # empty rows are zeros


def test_what_is_stored_has_the_layers_in_order_and_no_empty_row(tmp_path: Path) -> None:
    program = on("interleaved")
    save(tmp_path, program, placed(program, drawn()))
    stored = checkpoint.read_manifest(tmp_path, 7).arrays
    assert {n.removeprefix("params/"): s for n, (s, _) in stored.items() if n.startswith("params/")} == program.logical
    name = "params/blocks.mlp.up.weight"
    one = checkpoint.restore(tmp_path, 7, {name: flatten(on("one device").targets())[name]})
    np.testing.assert_array_equal(one[name], flatten(drawn())[name])
