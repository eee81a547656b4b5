"""Several processes save one checkpoint: each its own parts, all or nothing; and each reads its own parts alone."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import saving
from saved import LOGICAL, assert_same, mesh, state, targets

from jaxgpt.errors import UserError
from jaxgpt.training import checkpoint, manifest
from jaxgpt.training.checkpoint import Writer
from jaxgpt.training.resume import restore_last, unflatten

HERE = Path(__file__).parent
SHAPES = {"wte": LOGICAL["params/wte"]}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder into which two processes have saved, and what each of them has found."""
    folder = tmp_path_factory.mktemp("together")
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "saving.py"), str(index), str(port), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(saving.COUNT)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, complaint) in zip(started, ended, strict=True):
        assert process.returncode == 0, complaint
    return folder, [json.loads(printed.splitlines()[-1]) for printed, _ in ended]


def test_what_two_processes_saved_each_finds_again_and_one_opens_on_any_mesh(together: Any) -> None:
    folder, found = together
    assert [one["same"] for one in found] == [True, True]
    on = jax.make_mesh((4, 2), ("a", "b"))
    arrays = checkpoint.restore(folder, 7, saving.targets(on), saving.LOGICAL, saving.ROWS)
    for name, whole in saving.values(7).items():
        assert np.asarray(arrays[name]).tobytes() == whole.tobytes(), name


def test_no_two_processes_write_one_file_and_every_file_is_listed(together: Any) -> None:
    folder, _ = together
    where = checkpoint.path(folder, 7)
    listed = [line.partition("  ")[2] for line in (where / "CRC32C").read_text().splitlines()]
    there = {str(f.relative_to(where)) for f in (where / "arrays").rglob("*") if f.is_file() and f.name != "zarr.json"}
    assert len(listed) == len(set(listed))
    assert set(listed) == there
    assert {entry.name for entry in where.iterdir()} == set(manifest.PARTS)


def test_each_process_reads_little_more_than_its_part(together: Any) -> None:
    _, found = together
    # Of what is split over both, a half each; the rest is whole on both.
    sizes = {n: 4 * int(np.prod(saving.LOGICAL.get(n, shape))) for n, (shape, _) in saving.SPLITS.items()}
    shared = [n for n, (_, split) in saving.SPLITS.items() if "a" in str(split)]
    whole = sum(sizes.values())
    for one in found:
        assert one["read"] < 0.75 * whole
    assert sum(one["read"] for one in found) < 1.25 * (whole + sum(sizes[n] for n in sizes if n not in shared))


def test_where_one_cannot_write_all_say_so_and_nothing_is_committed(together: Any) -> None:
    folder, found = together
    for one in found:
        assert one["said"][0] == one["said"][2] == ""
        assert "step-00000008" in one["said"][1]
        assert "process 1: " in one["said"][1] and "File too large" in one["said"][1]
    assert {entry.name for entry in folder.iterdir()} == {"step-00000007", "step-00000009"}


def test_what_one_finds_damaged_none_takes(together: Any) -> None:
    _, found = together
    for one in found:
        assert (one["taken"], one["damaged"]) == (7, [9])
        assert "process 1: " in one["lines"][0] and "params/blocks.up/c/2/0/0" in one["lines"][0]


# One process, and what the others are made to say


class Played:
    """A process of several, and what the others say: `answers[name]` of each, nothing by default."""

    def __init__(self, index: int = 0, **answers: str) -> None:
        self.index, self.count, self.answers = index, 3, answers
        self.heard: list[tuple[str, str]] = []

    def exchange(self, name: str, said: str, timeout: float) -> list[str]:
        self.heard.append((name, said))
        answer = self.answers.get(name.split()[-1], "")
        if answer == "gone":
            raise TimeoutError("process 2 has not been heard of")
        told = [said] * self.count if name == "checkpoints" else [""] * self.count
        told[self.index], told[2] = said, answer
        return told


def test_all_write_before_the_first_commits(tmp_path: Path) -> None:
    group = Played()
    writer = Writer(tmp_path, 3, group=group)
    real = group.exchange

    def exchange(name: str, said: str, timeout: float) -> list[str]:
        if name == "checkpoint written":
            for piece in (1, 2):  # what the others have written
                (tmp_path / "step-00000007.partial" / f"CRC32C.{piece}").touch()
            assert checkpoint.steps(tmp_path) == []
        return real(name, said, timeout)

    group.exchange = exchange
    writer.save(7, state(mesh()), LOGICAL, {})
    writer.close()
    assert [name for name, _ in group.heard] == ["checkpoint begun", "checkpoint written", "checkpoint committed"]
    assert checkpoint.steps(tmp_path) == [7]
    assert_same(checkpoint.restore(tmp_path, 7, targets(mesh())), state(mesh()))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("when", ["begun", "written", "committed"])
@pytest.mark.parametrize("answer", ["No space left on device", "gone"])
def test_a_save_fails_with_what_another_says_or_its_silence(index: int, when: str, answer: str, tmp_path: Path) -> None:
    if index == 1:
        (tmp_path / "step-00000008.partial").mkdir()
    group = Played(index, **{when: answer})
    writer = Writer(tmp_path, 3, group=group)
    writer.save(8, state(mesh()), LOGICAL, {})
    said = "process 2 has not been heard of" if answer == "gone" else f"process 2: {answer}"
    with pytest.raises(UserError, match=rf"step-00000008: the checkpoint could not be written \(.*{said}"):
        writer.close()
    assert writer.last is None
    if index == 0 and when != "begun":
        assert not (tmp_path / "step-00000008.partial").exists()


def test_a_folder_of_that_name_that_is_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-00000008.partial").mkdir()
    (tmp_path / "step-00000008.partial" / "thesis.tex").write_text("mine")
    writer = Writer(tmp_path, 3)
    writer.save(8, state(mesh()), LOGICAL, {})
    with pytest.raises(UserError, match="File exists"):
        writer.close()
    assert (tmp_path / "step-00000008.partial" / "thesis.tex").read_text() == "mine"


def test_what_another_process_refuses_is_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 3)
    for step in (1, 2):
        writer.save(step, state(mesh()), LOGICAL, {})
    writer.close()
    tree = unflatten(targets(mesh()))
    with pytest.raises(UserError, match="process 2: array half is another"):
        restore_last(tmp_path, tree, SHAPES, pytest.fail, group=Played(restored="array half is another"))
    lines: list[str] = []
    with pytest.raises(UserError, match="no checkpoint is whole"):
        restore_last(tmp_path, tree, SHAPES, lines.append, group=Played(restored="damaged: c/0 is cut off"))
    assert "process 2: c/0 is cut off" in lines[0]
