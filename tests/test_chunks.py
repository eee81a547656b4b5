"""How stored arrays are cut: files that no two processes share, chunks that a part touches, slabs in order."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.training import chunks, zarr
from jaxgpt.training.chunks import Grid

GRIDS = [
    ((), Grid((), ())),
    ((7,), Grid((8,), (2,))),
    ((17, 6), Grid((8, 6), (4, 2))),
    ((3, 8, 10), Grid((1, 4, 5), (1, 2, 5))),
]


@pytest.mark.parametrize(("shape", "grid"), GRIDS, ids=str)
def test_the_files_of_an_array_cover_it_once(shape: tuple[int, ...], grid: Grid) -> None:
    covered = np.zeros(shape, int)
    names = []
    for name, part in grid.files(shape):
        covered[part] += 1
        names.append(name)
        assert [found for found, _ in grid.touched(part)] == [name]
    assert np.all(covered == 1)
    assert len(set(names)) == len(names)
    assert grid.count == np.prod(grid.file, dtype=int) // np.prod(grid.chunk, dtype=int)


@pytest.mark.parametrize(("shape", "grid"), GRIDS, ids=str)
def test_a_part_touches_the_chunks_of_its_elements_and_no_other(shape: tuple[int, ...], grid: Grid) -> None:
    chunk = {}
    inside = [f // c for f, c in zip(grid.file, grid.chunk, strict=True)]
    for at in np.ndindex(shape):
        file = "/".join(("c", *(str(a // f) for a, f in zip(at, grid.file, strict=True))))
        place = [a % f // c for a, f, c in zip(at, grid.file, grid.chunk, strict=True)]
        chunk[at] = (file, int(np.ravel_multi_index(place, inside)) if shape else 0)
    starts = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    for spans in itertools.islice(itertools.product(*starts), 0, None, 7):
        part = tuple(slice(*span) for span in spans)
        found = {(file, number) for file, numbers in grid.touched(part) for number in numbers}
        assert found == {chunk[at] for at in itertools.product(*(range(*span) for span in spans))}


@pytest.mark.parametrize("limit", [4, 24, 100, 4096])
def test_slabs_are_an_array_in_the_order_of_its_memory(limit: int) -> None:
    whole = np.arange(5 * 6 * 7, dtype=np.int32).reshape(5, 6, 7)
    pieces = [whole[part] for part in chunks.slabs(whole.shape, 4, limit)]
    assert np.array_equal(np.concatenate([piece.ravel() for piece in pieces]), whole.ravel())
    assert all(piece.nbytes <= limit for piece in pieces)
    assert list(chunks.slabs((), 4, 1)) == [()]


SPLITS = [
    ((64, 16), ("a", "b")),
    ((64, 16), (("a", "b"), None)),
    ((16, 24), (None, ("b", "a"))),
    ((8, 6, 12), ("b", None, "a")),
    ((6, 8, 10), (None, "a", None)),
]


@pytest.mark.parametrize("rows", [None, "reversed"])
@pytest.mark.parametrize(("shape", "split"), SPLITS, ids=str)
def test_no_two_shards_write_into_one_file(
    shape: tuple[int, ...], split: tuple[object, ...], rows: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zarr, "FILE_BYTES", 256)
    placed = NamedSharding(jax.make_mesh((4, 2), ("a", "b")), PartitionSpec(*split))
    shards = {str(index): zarr.resolve(index, shape) for index in placed.devices_indices_map(shape).values()}
    unit = placed.shard_shape(shape)
    if rows:  # stored in another order, row by row, as the layers of a pipeline are
        unit = (1, *unit[1:])
    grid = zarr.grid_for(unit, 4)
    written: list[str] = []
    for index in shards.values():
        parts = [index]
        if rows:
            parts = [(slice(shape[0] - 1 - r, shape[0] - r), *index[1:]) for r in range(index[0].start, index[0].stop)]
        written += {file for part in parts for file, _ in grid.touched(part)}
    assert len(written) == len(set(written))
    assert set(written) == {file for file, _ in grid.files(shape)}
