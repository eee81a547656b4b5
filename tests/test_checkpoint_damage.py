"""A hundred damaged checkpoints: each is known by the file that is wrong, none is opened, the one before it is."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from saved import LOGICAL, assert_same, files, mesh, save, state, targets

from jaxgpt.checkpoint_verbs import damage
from jaxgpt.errors import UserError
from jaxgpt.training import checkpoint, zarr
from jaxgpt.training.resume import Restored, flatten, restore_last, unflatten

HARMS = ("a byte flipped", "truncated", "missing", "swapped")
CASES = 100
SHAPES = {"wte": LOGICAL["params/wte"]}
SUMS = "SHA256SUMS"
"""What it says wrong of a file and what is wrong with the file look alike: the message names both."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of many files of many chunks, no value the same in two of them."""
    folder = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr, "FILE_BYTES", 1200)
        patch.setattr(zarr, "CHUNK_BYTES", 200)
        for step in (5, 6, 7):
            save(folder, step, state(mesh(), seed=step))
    return folder


def harmed(folder: Path, number: int) -> list[Path]:
    """Does one kind of harm to the last checkpoint, and returns the files that are wrong."""
    draw = np.random.default_rng(number)
    everything = files(folder / "step-00000007")
    # each kind of file as often as another, though there are more with chunks
    kind = [f for f in everything if (f.parent.name == f"step-{7:08d}") == (number % 8 < 4)]
    file = kind[draw.integers(len(kind))]
    content = file.read_bytes()
    harm = HARMS[number % 4]
    if harm == "a byte flipped":
        at = int(draw.integers(len(content)))
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << int(draw.integers(8))]) + content[at + 1 :])
    elif harm == "truncated":
        file.write_bytes(content[: int(draw.integers(len(content)))])
    elif harm == "missing":
        file.unlink()
    else:
        older = folder / "step-00000006" / file.relative_to(folder / "step-00000007")
        others = [f for f in [*everything, older] if f.name == file.name or f.parent == file.parent]
        others = [f for f in others if f.read_bytes() != content]
        other = older if not others or draw.random() < 0.3 else others[draw.integers(len(others))]
        if other.read_bytes() == content:  # as every zarr.json of the same array: look for one of another array
            other = next(f for f in everything if f.name == file.name and f.read_bytes() != content)
        file.write_bytes(other.read_bytes())
        if other in everything:
            other.write_bytes(content)
            return [file, other]
    return [file]


def opened(folder: Path, said: list[str]) -> Restored:
    found = restore_last(folder, unflatten(targets(mesh())), SHAPES, said.append)
    assert found is not None
    return found


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "damaged"))


def test_each_of_a_hundred_damages_is_found_and_named_and_the_one_before_is_taken(good: Path, damaged: Path) -> None:
    kinds = set()
    for number in range(CASES):
        wrong = harmed(damaged, number)
        kinds |= {(HARMS[number % 4], file.name if file.suffix or file.name.isupper() else "chunks") for file in wrong}
        said: list[str] = []
        found = opened(damaged, said)
        assert (found.step, found.damaged) == (6, [7]), (number, wrong)
        assert_same(flatten(found.state), state(mesh(), seed=6))
        (line,) = said
        assert "step 7 is damaged" in line
        named = list(damage(damaged, 7))
        if any(file.name == SUMS for file in wrong):
            assert SUMS in line and all(SUMS in f"{file}: {what}" for file, what in named), (number, line)
        else:
            assert any(str(file) in line for file in wrong), (number, line)
            assert sorted(file for file, _ in named) == sorted(wrong), number
        for file in wrong:
            shutil.copyfile(good / file.relative_to(damaged), file)
    assert len(kinds) == 4 * 5, kinds
    assert opened(damaged, []).step == 7


def test_strict_refuses_what_auto_passes_over(damaged: Path) -> None:
    wrong = harmed(damaged, 4)
    everything = {file: file.read_bytes() for file in files(damaged)}
    tree = unflatten(targets(mesh()))
    with pytest.raises(
        UserError, match=r"--resume strict: the checkpoint of step 7 is damaged: .*--resume auto"
    ) as met:
        restore_last(damaged, tree, SHAPES, pytest.fail, strict=True)
    assert str(wrong[0]) in str(met.value)
    with pytest.raises(UserError, match="--step 7: the checkpoint of step 7 is damaged"):
        restore_last(damaged, tree, SHAPES, pytest.fail, wanted="7")
    found = restore_last(damaged, tree, SHAPES, pytest.fail, wanted="5", strict=True)
    assert found is not None
    assert found.step == 5
    assert {file: file.read_bytes() for file in files(damaged)} == everything


def test_a_checkpoint_of_another_step_under_this_ones_name_is_damaged(damaged: Path) -> None:
    (damaged / "step-00000007").rename(damaged / "step-00000099")
    assert opened(damaged, said := []).step == 6
    assert "manifest.json: is of step 7" in said[0]


def test_a_checkpoint_of_another_version_is_refused_and_not_called_damaged(
    good: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("jaxgpt.training.manifest.FORMAT", 1)
    with pytest.raises(UserError, match="format 2, but this jaxgpt reads 1") as met:
        checkpoint.read_manifest(good, 7)
    assert not isinstance(met.value, checkpoint.DamagedCheckpoint)


def test_a_part_that_is_not_asked_for_is_not_read(damaged: Path) -> None:
    """A run that is only to be evaluated opens, though its moments are damaged."""
    (damaged / "step-00000007/arrays/mu/blocks.weight/c/0/0/0").unlink()
    wanted: dict[str, jax.ShapeDtypeStruct] = {"params/norm": targets(mesh())["params/norm"]}
    assert checkpoint.restore(damaged, 7, wanted).keys() == wanted.keys()
