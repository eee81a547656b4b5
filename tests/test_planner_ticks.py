"""Closed forms against the tables that they stand for."""

import pytest

from jaxgpt.pipeline.buffers import plan
from jaxgpt.pipeline.checker import check
from jaxgpt.pipeline.schedule import schedule
from jaxgpt.planner.ticks import Rings, rings, table_time, ticks

SIZES = [
    (name, p, m, v)
    for name, chunks in (("1f1b", (1,)), ("gpipe", (1,)), ("zero-bubble", (1,)), ("interleaved", (2, 3)))
    for p in (2, 3, 5)
    for m in (1, 2, 3, 4, 5, 6, 9, 10, 15, 30)
    for v in chunks
    if name != "interleaved" or m % p == 0
]


@pytest.mark.parametrize(("name", "p", "m", "v"), SIZES)
def test_ticks_and_rings(name, p, m, v):
    table = schedule(name, p, m, v)
    found = plan(table)
    assert ticks(name, p, m, v) == len(table.operation)
    wanted = Rings(found.residuals, found.splits, found.inbox_forward, found.inbox_backward, found.heads)
    assert rings(name, p, m, v) == wanted


@pytest.mark.parametrize(("name", "p", "m", "v"), [*SIZES, *(("zero-bubble", p, 9 * p, 1) for p in (2, 3, 4, 7))])
def test_time(name, p, m, v):
    """9 p microbatches are continued from fewer."""
    table = check(schedule(name, p, m, v))
    for f, b, w in ((1.0, 1.0, 1.0), (1.0, 2.5, 0.5), (0.5, 1.0, 3.0)):
        assert table_time(name, p, m, v, f / v, b / v, w / v) == pytest.approx(table.time(f, b, w))


def test_one_stage_has_no_rings():
    assert ticks("1f1b", 1, 7) == 7
    assert rings("1f1b", 1, 7) == Rings(0, 0, 0, 0, 0)
