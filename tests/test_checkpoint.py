"""Checkpoints: the same bits on any mesh, no padding on disk, every damage found and named, failure without loss."""

import errno
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved import LOGICAL, SPLITS, VOCAB, WIDTH, assert_same, files, mesh, save, sharding, state, targets

from jaxgpt.errors import UserError
from jaxgpt.training import checkpoint, zarr
from jaxgpt.training.checkpoint import DamagedCheckpoint, Writer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 7, state(mesh(fsdp=8)))
    return folder


MESHES = [{"fsdp": 8}, {"data": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 2}, {}]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_saved_on_one_mesh_restored_on_another_bit_for_bit(saved: Path, sizes: dict[str, int]) -> None:
    on = mesh(**sizes)
    restored = checkpoint.restore(saved, 7, targets(on), LOGICAL)
    assert_same(restored, state(on))
    assert all(array.sharding == sharding(name, on) for name, array in restored.items())


@pytest.mark.parametrize("sizes", MESHES[1:3], ids=str)
def test_the_disk_is_the_same_whatever_the_mesh(saved: Path, sizes: dict[str, int], tmp_path: Path) -> None:
    save(tmp_path, 7, state(mesh(**sizes)))
    ours, theirs = files(tmp_path), files(saved)
    assert [f.relative_to(tmp_path) for f in ours] == [f.relative_to(saved) for f in theirs]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("padded", [17, 24, 128])
def test_padding_is_not_stored_and_comes_back_as_zeros(saved: Path, padded: int) -> None:
    on = mesh() if padded == 17 else mesh(fsdp=2, tensor=4)
    wte = checkpoint.restore(saved, 7, {"params/wte": targets(on, padded)["params/wte"]}, LOGICAL)["params/wte"]
    assert checkpoint.read_manifest(saved, 7).arrays["params/wte"] == ((VOCAB, WIDTH), np.float32)
    assert wte.shape == (padded, WIDTH)
    assert np.array_equal(np.asarray(wte)[:VOCAB], np.asarray(state(mesh())["params/wte"])[:VOCAB])
    assert not np.any(np.asarray(wte)[VOCAB:])


def test_many_files_of_many_chunks_and_a_part_reads_its_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zarr, "FILE_BYTES", 1200)
    monkeypatch.setattr(zarr, "CHUNK_BYTES", 300)
    save(tmp_path, 7, state(mesh(fsdp=2, tensor=4)))
    assert_same(checkpoint.restore(tmp_path, 7, targets(mesh(data=2, fsdp=2, tensor=2)), LOGICAL), state(mesh()))
    where = tmp_path / "step-00000007" / "arrays" / "params" / "blocks.weight"
    chunks = files(where / "c")
    assert len(chunks) > 3
    chunks[-1].unlink()
    first, last = (slice(0, 1), slice(0, 2), slice(0, 24)), (slice(2, 3), slice(14, 16), slice(0, 24))
    values = zarr.read(where, (3, WIDTH, 24), np.dtype(np.float32), [first], None)
    assert np.array_equal(values[0], np.asarray(state(mesh())["params/blocks.weight"])[first])
    with pytest.raises(zarr.Unreadable):
        zarr.read(where, (3, WIDTH, 24), np.dtype(np.float32), [last], None)


def test_a_part_of_the_arrays_can_be_restored(saved: Path) -> None:
    wanted = {name: target for name, target in targets(mesh(fsdp=2)).items() if name.startswith("params/")}
    assert checkpoint.restore(saved, 7, wanted).keys() == wanted.keys()


def test_saved_values_are_those_of_the_call_though_the_arrays_are_donated(tmp_path: Path) -> None:
    arrays = state(mesh(fsdp=8))
    expected = {name: np.array(value) for name, value in arrays.items()}
    # All on 8 devices, replicated ones as well, overwritten while the disk is being written.
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), tree), donate_argnums=0)
    writer = Writer(tmp_path, 3)
    writer.save(7, arrays, LOGICAL, {})
    jax.block_until_ready(overwrite(arrays))
    writer.close()
    restored = checkpoint.restore(tmp_path, 7, targets(mesh()))
    assert all(np.asarray(restored[name]).tobytes() == expected[name].tobytes() for name in expected)


def test_manifest_says_step_and_what_the_caller_added(saved: Path) -> None:
    manifest = checkpoint.read_manifest(saved, 7)
    assert (manifest.step, manifest.meta) == (7, {"samples": 28})
    assert manifest.arrays["half"] == ((8, 5), jnp.bfloat16)
    assert manifest.arrays.keys() == SPLITS.keys()


def positions() -> Iterator[tuple[int, float]]:
    """File number and place in it, spread over all files: first, last and inner bytes."""
    for number in range(3 + 2 * len(SPLITS)):
        for place in (0.0, 0.31, 0.62, 0.97, 1.0):
            yield number, place


def test_a_flipped_byte_is_found_wherever_it_lies(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    everything, wanted = files(folder), targets(mesh(fsdp=2))
    assert len(everything) == 3 + 2 * len(SPLITS)
    for number, place in positions():
        file = everything[number]
        good = file.read_bytes()
        bad = bytearray(good)
        bad[round(place * (len(good) - 1))] ^= 1 << (number % 8)
        file.write_bytes(bad)
        with pytest.raises(DamagedCheckpoint) as caught:
            checkpoint.restore(folder, 7, wanted)
        array = next((name for name in SPLITS if f"/{name}/" in str(file)), "")
        assert array in str(caught.value)
        assert str(file) in str(caught.value) or file.name == "SHA256SUMS"
        file.write_bytes(good)
    assert_same(checkpoint.restore(folder, 7, wanted), state(mesh(fsdp=2)))


@pytest.mark.parametrize("harm", ["truncate", "empty", "remove"])
def test_a_shortened_or_missing_file_is_found(saved: Path, tmp_path: Path, harm: str) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    wanted = targets(mesh(fsdp=2))
    for file in files(folder):
        good = file.read_bytes()
        if harm == "remove":
            file.unlink()
        else:
            file.write_bytes(good[:-1] if harm == "truncate" else b"")
        with pytest.raises(DamagedCheckpoint):
            checkpoint.restore(folder, 7, wanted)
        file.write_bytes(good)


def test_another_model_is_refused_by_the_name_of_the_array(saved: Path) -> None:
    good = targets(mesh())
    bigger = jax.ShapeDtypeStruct((5, 16, 24), jnp.float32, sharding=sharding("params/blocks.weight", mesh()))
    half = jax.ShapeDtypeStruct((3, 16, 24), jnp.bfloat16, sharding=sharding("params/blocks.weight", mesh()))
    cases = {"other": good["step"], "params/blocks.weight": bigger, "mu/blocks.weight": half}
    for name, target in cases.items():
        with pytest.raises(UserError, match=name) as caught:
            checkpoint.restore(saved, 7, {name: target}, {name: target.shape})
        assert not isinstance(caught.value, DamagedCheckpoint)


def test_keeps_the_last_and_leaves_foreign_files_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-best").mkdir()
    arrays = {"step": state(mesh())["step"]}
    writer = Writer(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        writer.save(step, arrays, {}, {})
    writer.close()
    assert checkpoint.steps(tmp_path) == [3, 4]
    assert writer.last == 4
    assert {entry.name for entry in tmp_path.iterdir()} == {"notes.txt", "step-best", "step-00000003", "step-00000004"}


def test_what_a_killed_save_left_is_no_checkpoint_and_only_that_is_removed(saved: Path, tmp_path: Path) -> None:
    left = Path(shutil.copytree(saved / "step-00000007", tmp_path / "step-00000009.partial"))
    (left / "manifest.json").unlink()
    (left / "CRC32C.3").touch()
    foreign = Path(shutil.copytree(left, tmp_path / "step-00000010.partial"))
    (foreign / "thesis.tex").write_text("mine")
    (tmp_path / "step-old.partial").mkdir()
    assert checkpoint.steps(tmp_path) == []
    assert checkpoint.clear_partial(tmp_path) == [left]
    assert (foreign / "thesis.tex").exists()
    assert (tmp_path / "step-old.partial").exists()


def test_set_aside_never_overwrites(saved: Path, tmp_path: Path) -> None:
    for _ in range(3):
        shutil.copytree(saved / "step-00000007", tmp_path / "step-00000007")
        checkpoint.set_aside(tmp_path, 7)
    assert checkpoint.steps(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


@pytest.fixture
def little_space() -> Iterator[None]:
    """No file can grow beyond 1000 bytes."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("little_space")
def test_a_save_that_fails_leaves_earlier_checkpoints_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "step-00000007").symlink_to(saved / "step-00000007")
    writer = Writer(tmp_path, 1)
    writer.save(8, state(mesh(fsdp=8), seed=1), LOGICAL, {})
    with pytest.raises(UserError, match=r"step-00000008.*File too large"):
        writer.wait()
    writer.wait()
    writer.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000007"]
    assert writer.last == 7
    assert_same(checkpoint.restore(tmp_path, 7, targets(mesh())), state(mesh()))


def test_a_full_disk_at_the_commit_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    writer.save(8, state(mesh()), LOGICAL, {})
    with pytest.raises(UserError, match="No space left"):
        # A save waits for the one before it, and says what became of it.
        writer.save(9, state(mesh()), LOGICAL, {})
    writer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [(), (1,), (5,), (50688, 768), (96, 12288, 49152), (7, 11, 13), (30011, 3)])
def test_chunks_divide_the_array_and_are_small(shape: tuple[int, ...]) -> None:
    outer = zarr.chunk_shape(shape, 4, zarr.FILE_BYTES)
    inner = zarr.chunk_shape(outer, 4, zarr.CHUNK_BYTES)
    for parts, whole, limit in ((outer, shape, zarr.FILE_BYTES), (inner, outer, zarr.CHUNK_BYTES)):
        assert all(n % m == 0 for m, n in zip(parts, whole, strict=True))
        assert np.prod(parts, dtype=int) * 4 <= limit


def test_a_large_array_is_cut_in_every_dimension_that_a_mesh_may_split() -> None:
    inner = zarr.chunk_shape((96, 12288, 12288), 4, zarr.CHUNK_BYTES)
    pieces = [n // m for m, n in zip(inner, (96, 12288, 12288), strict=True)]
    assert min(pieces) >= 8
