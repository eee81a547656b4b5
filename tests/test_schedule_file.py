"""A user's own schedule from a file: the same table as was written, or one line that says what is wrong with it."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from quickly import unoptimized
from tiny import FAMILIES, batches, run_config

from jaxgpt.errors import UserError
from jaxgpt.pipeline import schedule_file
from jaxgpt.pipeline.schedule import SCHEDULES, schedule
from jaxgpt.planner.choose import search
from jaxgpt.planner.hardware import find
from jaxgpt.sharding import mesh
from jaxgpt.training import parity

GOOD = """
# two stages
F0 .  | .  .
F1 F0 | .  B0
.  F1 | B0 B1   # the last
.  .  | B1 .
"""


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "table.txt"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_written_is_the_table_read(name, file):
    table = schedule(name, 4, 8, 2 if name == "interleaved" else 1)
    found = schedule_file.read(file(schedule_file.text(table)), (4, 8, table.chunks))
    for array in ("operation", "microbatch", "chunk"):
        assert np.array_equal(getattr(found, array), getattr(table, array))
    assert found.slots == table.slots


def test_a_table_by_hand(file):
    found, wanted = schedule_file.read(file("\ufeff" + GOOD.replace("\n", "\r\n"))), schedule("1f1b", 2, 2)
    assert np.array_equal(found.operation, wanted.operation)
    assert np.array_equal(found.microbatch, wanted.microbatch)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no ticks"),
        ("|", "line 1 has 0 and 0 cells in its slots"),
        (". | .", "microbatches is 0, must be at least 1"),
        ("F999999.9999 | B0", "1000000 microbatches in 10000 parts are 10000000000 forwards, and it has 2 places"),
        (GOOD.replace("F1 F0", "F1 X0"), "line 4: 'X0' must be F, B, I or W and a microbatch"),
        (GOOD.replace("F1 F0", "F1   "), "line 4 has 1 and 2 cells in its slots; every slot of every line must have"),
        (GOOD.replace(".  B0", ".  B0 B0"), "line 4 has 2 and 3 cells"),
        (GOOD.replace("B1 .", ".  ."), "stage 0, chunk 0, microbatch 1: no tick runs BACKWARD or INPUT of part 0"),
        (GOOD.replace("B1 .", "B0 ."), "line 6, tick 3, slot 1, stage 0, microbatch 0: BACKWARD of part 0 a second"),
        (
            GOOD.replace("F0 .  | .  .", "F0 .  | B0 .").replace("B0 B1", ".  B1"),
            "tick 0, slot 1, stage 0, microbatch 0",
        ),
    ],
)
def test_a_wrong_table_is_refused_by_line_or_by_slot_and_rule(file, text, says):
    path = file(text)
    with pytest.raises(UserError) as caught:
        schedule_file.read(path)
    assert str(caught.value).startswith(f"--schedule-file {path}: ")
    assert says in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, reason in (("none", "No such file"), ("bytes", "is not text")):
        with pytest.raises(UserError, match=reason):
            schedule_file.read(tmp_path / name)


def test_it_must_be_of_the_mesh_and_of_the_batch(file):
    config = run_config(FAMILIES["gpt"], schedule_file=str(file(GOOD)), global_batch=8, micro_batch=4)
    mesh.check(config, mesh.parse("pipe=2"))
    with pytest.raises(UserError, match="is of 2 microbatches, but --global-batch and --micro-batch make 1"):
        mesh.check(config, mesh.parse("pipe=2,data=2"))
    assert any("does nothing" in note for note in mesh.check(config, mesh.parse("data=2")))
    beside = dataclasses.replace(config, schedule="gpipe")
    assert any("--schedule gpipe: does nothing beside" in note for note in mesh.check(beside, mesh.parse("pipe=2")))


def test_a_plan_has_none(file):
    config = run_config(FAMILIES["gpt"], schedule_file=str(file(GOOD)), mesh="pipe=2")
    with pytest.raises(UserError, match=r"--schedule-file .*: a plan chooses .*; leave it out, or train with a --mesh"):
        search(config, find("h100"), 2, {"mesh"})


MIXED = """
F0 .  | .  .
.  F0 | F1 B0
B0 .  | .  F1
.  I1 | .  .
I1 .  | .  W1
W1 .  | .  .
"""
"""Forwards in either slot, and backwards, whole and in two parts, before them and after them."""


def test_a_run_by_it_has_the_numbers_of_one_device_whatever_its_slots_hold(file):
    config = run_config(FAMILIES["gpt"], schedule_file=str(file(MIXED)), micro_batch=16)
    with unoptimized():
        ours, ones = (parity.trace(config, each, batches(config, 2)) for each in ("pipe=2", "data=1"))
    assert all(each.holds for each in parity.differences(ones, ours))
