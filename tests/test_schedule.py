"""Schedules' tables: their bubbles and memory, what the checker refuses, where the loop keeps things, the pictures."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from jaxgpt.errors import UserError
from jaxgpt.pipeline import picture, placement
from jaxgpt.pipeline.buffers import Plan, plan
from jaxgpt.pipeline.checker import check
from jaxgpt.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    IDLE,
    INPUT,
    SCHEDULES,
    WEIGHTS,
    Schedule,
    one_f_one_b,
    schedule,
)
from jaxgpt.planner.pipeline import Pipeline

STAGES = (1, 2, 3, 4, 5, 8, 11, 16)
SIZES = [(p, m) for p in STAGES for m in (1, 2, 3, 4, 7, 8, 16, 31, 128)]
SMALL = [
    (name, p, m, v)
    for name in SCHEDULES
    for v in ((2, 3) if name == "interleaved" else (1,))
    for p in range(1, 7)
    for m in range(1, 21)
    if name != "interleaved" or m % p == 0
]
FORMS = [
    (frozenset({FORWARD, BACKWARD, INPUT, WEIGHTS}),),
    (frozenset({FORWARD}), frozenset({BACKWARD, INPUT}), frozenset({WEIGHTS})),
    (frozenset({WEIGHTS, BACKWARD}), frozenset({FORWARD, INPUT})),
]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_idle_share_of_whole_backwards_whatever_they_cost(name):
    for p, m in SIZES:
        facts = check(schedule(name, p, m))
        for costs in ((1.0, 1.0, 1.0), (1.0, 0.7, 1.9)):
            assert facts.idle_share(*costs) == pytest.approx((p - 1) / (m + p - 1))
            assert facts.time(*costs) == pytest.approx((m + p - 1) * sum(costs))
        held = {"1f1b": lambda s, p=p, m=m: min(m, 2 * (p - 1 - s) + 1), "gpipe": lambda s, m=m: m}[name]
        assert facts.held == tuple(held(s) for s in range(p))
        assert facts.messages == (p - 1) * m
    assert check(schedule("1f1b", 8, 64)).time() == 213
    assert schedule("1f1b", 5, 9).operation.shape == (9 + 2 * 4, 2, 5)


def test_idle_share_of_interleaved():
    for p, m in SIZES:
        for v in (2, 3, 4) if m % p == 0 else ():
            facts = check(schedule("interleaved", p, m, v))
            assert facts.idle_share() == pytest.approx((p - 1) / (v * m + p - 1))
            assert facts.time() == pytest.approx(3 * (m + (p - 1) / v))
            assert facts.held == tuple(min(v * m, (v + 1) * p - 1 - 2 * s) for s in range(p))
            assert facts.messages == (m * (p * v - 1) if p > 1 else 0)


def test_zero_bubble():
    for p, m in [*SIZES, *((stages, 3 * (stages - 1)) for stages in STAGES[1:])]:
        facts, plain = check(schedule("zero-bubble", p, m)), (p - 1) / (m + p - 1)
        assert facts.ticks == facts.time() == max(3 * m + p - 1, 2 * m + 2 * p - 1)
        assert facts.idle_share() <= plain + 1e-12
        if m >= p:
            assert facts.idle_share() == pytest.approx((p - 1) / (3 * m + p - 1))
        if m >= 3 * (p - 1):
            assert facts.idle_share() <= 0.4 * plain + 1e-12
        assert max(facts.held) == min(m, p)
        assert all(held >= min(m, p - s) for s, held in enumerate(facts.held))


def test_one_stage_is_accumulation():
    table = one_f_one_b(1, 5)
    assert (table.operation[:, :, 0] == [FORWARD, BACKWARD]).all()
    assert (table.microbatch[:, :, 0] == np.arange(5)[:, None]).all()
    assert check(table).idle_share() == 0
    assert check(table).held == (1,)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (("1f1", 2, 4, 1), "--schedule 1f1: must be one of 1f1b, gpipe, interleaved, zero-bubble"),
        (("1f1b", 2, 4, 2), "--virtual-stages 2: only --schedule interleaved has virtual stages"),
        (("gpipe", 2, 4, 3), "--virtual-stages 3: only"),
        (("zero-bubble", 2, 4, 0), "--virtual-stages 0: only"),
        (("interleaved", 2, 4, 1), "--virtual-stages 1: --schedule interleaved needs at least 2"),
        (("interleaved", 4, 6, 2), "microbatches 6: --schedule interleaved needs a multiple of the 4 stages"),
        *(((name, 0, 4, 1 + (name == "interleaved")), "stages 0: a schedule needs at least 1") for name in SCHEDULES),
        *(((name, 4, 0, 1 + (name == "interleaved")), "microbatches 0: a schedule needs") for name in SCHEDULES),
    ],
)
def test_sizes_that_a_schedule_refuses(sizes, says):
    with pytest.raises(UserError, match="^" + says):
        schedule(*sizes)


def changed(table: Schedule, *changes: tuple[tuple[int, int, int], int, int, int], name: str = "mine") -> Schedule:
    """The table with operation, microbatch and chunk at these places (tick, slot, stage) replaced."""
    arrays = {each: getattr(table, each).copy() for each in ("operation", "microbatch", "chunk")}
    for place, *values in changes:
        for array, value in zip(arrays.values(), values, strict=True):
            array[place] = value
    return dataclasses.replace(table, name=name, **arrays)


IDLY, F0, B0 = (IDLE, -1, -1), (FORWARD, 0, 0), (BACKWARD, 0, 0)
PLAIN, SPLIT = schedule("1f1b", 2, 3), schedule("zero-bubble", 2, 3)  # stage 0 of SPLIT: F F . B W F B W B W


@pytest.mark.parametrize(
    ("changes", "place", "says"),
    [
        ([((1, 0, 0), BACKWARD, 1, 0)], (1, 0, 0, 1), "BACKWARD in a slot that may hold FORWARD"),
        ([((1, 0, 0), 7, 1, 0)], (1, 0, 0, 1), "operation 7 in a slot that may hold FORWARD"),
        ([((1, 0, 0), FORWARD, 3, 0)], (1, 0, 0, 3), "microbatch 3, must be 0 to 2"),
        ([((1, 0, 0), FORWARD, 1, 1)], (1, 0, 0, 1), "chunk 1, must be 0 to 0"),
        ([((0, 0, 1), IDLE, 1, -1)], (0, 0, 1, 1), "microbatch 1 where the stage is idle, must be -1"),
        ([((2, 0, 0), FORWARD, 1, 0)], (2, 0, 0, 1), "FORWARD of part 0 a second time, must run once"),
        (
            [((0, 0, 1), *F0), ((1, 0, 1), *IDLY)],
            (0, 0, 1, 0),
            "FORWARD of part 1 needs the previous part's activation",
        ),
        ([((1, 1, 0), *B0), ((2, 1, 0), *IDLY)], (1, 1, 0, 0), "BACKWARD of part 0 needs the next part's gradient"),
        ([((0, 1, 1), *B0), ((1, 1, 1), *IDLY)], (0, 1, 1, 0), "BACKWARD of part 1 needs the head's gradient"),
    ],
)
def test_the_checker_names_place_and_rule(changes, place, says):
    where = "tick {}, slot {}, stage {}, microbatch {}".format(*place)
    with pytest.raises(UserError, match=f"^--schedule mine: {where}: {says}"):
        check(changed(PLAIN, *changes))


def test_the_checker_names_what_is_missing_and_what_has_no_shape():
    arrays = dict.fromkeys(("operation", "microbatch", "chunk"), np.zeros((0, 2, 2), int))
    swapped = changed(SPLIT, ((3, 0, 0), WEIGHTS, 0, 0), ((4, 0, 0), INPUT, 0, 0))
    refused = [
        (
            changed(PLAIN, ((2, 0, 0), *IDLY)),
            "stage 0, chunk 0, microbatch 2: no tick runs FORWARD of part 0, must run",
        ),
        (
            changed(PLAIN, ((4, 1, 0), *IDLY)),
            "stage 0, chunk 0, microbatch 2: no tick runs BACKWARD or INPUT of part 0",
        ),
        (changed(SPLIT, ((9, 0, 0), *IDLY)), "microbatch 2: no tick runs WEIGHTS after its INPUT of part 0"),
        (
            swapped,
            "tick 3, slot 0, stage 0, microbatch 0: WEIGHTS of part 0 needs its INPUT, there from tick 5, slot 0",
        ),
        (dataclasses.replace(PLAIN, stages=3), r"operation has shape \(5, 2, 2\), must have \(5, 2, 3\): ticks, slots"),
        (dataclasses.replace(PLAIN, slots=()), "a tick has no slots"),
        (dataclasses.replace(PLAIN, slots=(frozenset({9}), frozenset())), r"slot 0 may hold \[9\], must be some of"),
        (dataclasses.replace(PLAIN, microbatches=0), "microbatches is 0, must be at least 1"),
        (dataclasses.replace(PLAIN, **arrays), "the table is empty"),
    ]
    for table, says in refused:
        with pytest.raises(UserError, match=f"^--schedule {table.name}: .*{says}"):
            check(table)


def test_one_exchange_a_tick_and_one_kind_of_backward():
    none = np.full((1, 4, 1), -1)
    runs = [[[FORWARD], [BACKWARD], [FORWARD], [BACKWARD]]]
    table = Schedule("mine", 1, 2, 1, FORMS[0] * 4, np.array(runs), np.array([[[0], [0], [1], [1]]]), none + 1)
    with pytest.raises(UserError, match="slot 2, stage 0, microbatch 1: FORWARD is the stage's second activation in a"):
        check(table)
    both = changed(table, ((0, 2, 0), INPUT, 0, 0), ((0, 3, 0), WEIGHTS, 0, 0))
    with pytest.raises(UserError, match="slot 2, stage 0, microbatch 0: part 0 runs BACKWARD and a part of it as well"):
        check(dataclasses.replace(both, microbatches=1))


class Walk:
    """The rules once more: a walk through time that remembers when each thing was done."""

    def __init__(self, stages: int, chunks: int):
        self.stages, self.last = stages, stages * chunks - 1
        self.when: dict[tuple[str, int, int], tuple[int, int]] = {}
        self.sent: set[tuple[int, int, str]] = set()

    def run(self, tick: int, slot: int, operation: int, part: int, i: int) -> bool:
        """Whether it may run now; it has, if so."""
        never = (10**6, 0)
        made = {FORWARD: ["forward"], BACKWARD: ["input", "weights"], INPUT: ["input"], WEIGHTS: ["weights"]}
        kinds = made[operation]
        if operation == FORWARD:
            ready = part == 0 or self.when.get(("forward", part - 1, i), never)[0] < tick
        elif operation == WEIGHTS:
            ready = self.when.get(("input", part, i), never) < (tick, slot)
        elif part == self.last:
            ready = self.when.get(("forward", part, i), never) < (tick, slot)
        else:
            ready = self.when.get(("input", part + 1, i), never)[0] < tick
        sends = (tick, part % self.stages, kinds[0])
        again = any((kind, part, i) in self.when for kind in kinds)
        if not ready or again or (sends in self.sent and operation != WEIGHTS):
            return False
        self.when |= {(kind, part, i): (tick, slot) for kind in kinds}
        self.sent.add(sends)
        return True


def entries(table: Schedule) -> list[list[int]]:
    """Everything that is run, in order of time: tick, slot, operation, part, microbatch."""
    tick, slot, stage = at = np.nonzero(table.operation != IDLE)
    part = table.chunk[at] * table.stages + stage
    return np.stack([tick, slot, table.operation[at], part, table.microbatch[at]], axis=1).tolist()


def at_random(stages: int, microbatches: int, chunks: int, slots: tuple[frozenset[int], ...], seed: int) -> Schedule:
    """A table that keeps the rules and is drawn at random: in each slot any operation that is ready, or none."""
    chance, walk, table = random.Random(seed), Walk(stages, chunks), []
    waiting = []
    for g, i in np.ndindex(stages * chunks, microbatches):
        backward = [(BACKWARD, g, i)] if chance.random() < 0.5 else [(INPUT, g, i), (WEIGHTS, g, i)]
        waiting += [(FORWARD, g, i), *backward]
    while waiting:
        table.append(np.full((3, len(slots), stages), -1))
        table[-1][0] = IDLE
        for slot, stage in np.ndindex(len(slots), stages):
            mine = [each for each in waiting if each[1] % stages == stage and each[0] in slots[slot]]
            for each in chance.sample(mine, len(mine)) if chance.random() < 0.9 else ():
                if walk.run(len(table) - 1, slot, *each):
                    table[-1][:, slot, stage] = each[0], each[2], each[1] // stages
                    waiting.remove(each)
                    break
    return Schedule("drawn", stages, microbatches, chunks, slots, *np.stack(table, axis=1))


def drawn() -> list[Schedule]:
    shapes = [(1, 4, 1), (1, 3, 2), (2, 5, 1), (3, 4, 2), (4, 6, 1), (2, 4, 3)]
    return [at_random(*shape, slots, seed) for seed in range(4) for shape in shapes for slots in FORMS]


def test_the_checker_passes_what_keeps_the_rules_and_nothing_else():
    chance, passed = random.Random(0), 0
    for table in [*drawn(), *(schedule(*each) for each in SMALL if each[1] * each[2] in (6, 8, 12))]:
        check(table)
        for _ in range(4):
            tick, slot, stage = (chance.randrange(n) for n in table.operation.shape)
            a, b = (tick, slot, stage), (max(tick - chance.randrange(3), 0), slot, stage)
            ours, theirs = ([x[at] for x in (table.operation, table.microbatch, table.chunk)] for at in (a, b))
            other = changed(table, (a, *theirs), (b, *ours))
            walk = Walk(table.stages, table.chunks)
            if all(walk.run(*each) for each in entries(other)):
                check(other)
                passed += not np.array_equal(other.operation, table.operation)
            else:
                with pytest.raises(UserError):
                    check(other)
    assert passed > 25


def play(table: Schedule, where: Plan) -> None:
    """The loop with names for values: what each slot reads must be what it needs. Arrivals are written unasked."""
    stages, slots, last = table.stages, len(table.slots), table.parts - 1
    sizes = (where.residuals, where.splits, where.inbox_forward, where.inbox_backward)
    kept, split, activations, gradients = ([[None] * size for _ in range(stages)] for size in sizes)
    heads, forward, backward = [None] * where.heads, [None] * stages, [None] * stages
    places = (where.residual, where.split, where.take, where.head_take)
    columns = [each.ravel().tolist() for each in (table.operation, table.microbatch, table.chunk, *places)]
    for n, (operation, i, chunk, residual, split_at, take, head) in enumerate(zip(*columns, strict=True)):
        tick, slot, stage = n // (slots * stages), n // stages % slots, n % stages
        me = (g, _) = (chunk * stages + stage, i)
        if operation == FORWARD:
            assert activations[stage][take] == (g - 1, i) if g else where.first_forward[tick, slot] == i
            forward[stage] = me
        elif operation != IDLE:
            assert kept[stage][residual] == me
        if operation in (BACKWARD, INPUT):
            assert (heads[head] == me) if g == last else (gradients[stage][take] == (g + 1, i))
            assert g != 0 or where.first_backward[tick, slot] == i
            backward[stage] = me
        if operation == WEIGHTS:
            assert split[stage][split_at] == me
        if operation == FORWARD:
            kept[stage][residual] = me
        if operation == INPUT and where.splits:
            split[stage][split_at] = me
        if stage == stages - 1 and where.head[tick, slot] >= 0:
            assert forward[-1] == (last, where.head[tick, slot])
            heads[where.head_put[tick, slot]] = forward[-1]
        if stage == stages - 1 and slot == slots - 1:
            for to in range(stages):
                activations[to][where.put_forward[tick, to]] = forward[to - 1]
                gradients[to][where.put_backward[tick, to]] = backward[(to + 1) % stages]
            forward, backward = [None] * stages, [None] * stages
    for each in (where.head, where.first_forward, where.first_backward):
        assert sorted(each[each >= 0]) == list(range(table.microbatches))


def test_nothing_is_overwritten_before_it_is_read():
    for table in [*(SCHEDULES[name](*sizes) for name, *sizes in SMALL), *drawn()]:
        where = plan(table)
        play(table, where)
        assert where.residuals == max(check(table).held)
        assert (where.splits > 0) == bool((table.operation == INPUT).any())
        assert all(np.asarray(getattr(where, f.name)).dtype in (np.int32, int) for f in dataclasses.fields(Plan))


def test_rings_are_as_long_as_they_must_be():
    for p in range(1, 9):
        ring = plan(schedule("1f1b", p, 2 * p - 1))
        assert (ring.residuals, ring.inbox_forward, ring.inbox_backward, ring.heads) == (2 * p - 1, 1, 1, 1)
        ring = plan(schedule("interleaved", p, 3 * p, 2))
        assert (ring.residuals, ring.inbox_forward, ring.inbox_backward, ring.heads) == (3 * p - 1, 1, 1, 1)
        assert plan(schedule("gpipe", p, 9)).heads == 9
        assert plan(schedule("gpipe", p, 9)).residuals == 9
        assert plan(schedule("zero-bubble", p, 4 * p)).residuals == p


def test_shorter_parts_wait_for_the_longest_where_they_run_beside_it():
    """Forwards take 3, 4 and 4, backwards 8, 8 and 6, of which stages of 3 and 4 layers work 18 and 24."""
    table = schedule("gpipe", 2, 2)
    found = Pipeline(table, placement.place(7, 2, 1, "3,4"), check(table), plan(table))
    assert found.idle_share == pytest.approx(1 - 42 / (2 * 33))
    even = Pipeline(table, placement.place(8, 2, 1, "auto"), check(table), plan(table))
    assert even.idle_share == pytest.approx(check(table).idle_share())


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_in_text(name):
    v = 2 if name == "interleaved" else 1
    table = schedule(name, 4, 8, v)
    for width in (15, 20, 30, 47, 70, 101, 160, 300):
        lines = picture.text(table, width).splitlines()
        assert max(len(line) for line in lines) <= width
        assert [line[:7] for line in lines if line.startswith("stage ")] == [f"stage {stage}" for stage in range(4)]
    for line in lines[:4]:
        assert all(line.count(letter) == 8 * v for letter in "FB")
        assert line.count("W") == (8 if name == "zero-bubble" else 0)
    assert lines[1].split()[2:4] == ["....", "F0.0"] if v == 2 else ["..", "F0"]
    letters = picture.text(table, 70).splitlines()[:4]
    assert "~" not in "".join(letters) and "0" not in letters[1]
    assert "~" in picture.text(table, 30)
    assert f"idle for {check(table).idle_share():.1%}" in " ".join(lines)


def test_the_picture_as_png(tmp_path: Path):
    for name, p, m, v in [("1f1b", 4, 8, 1), ("interleaved", 2, 4, 2), ("zero-bubble", 8, 64, 1)]:
        picture.png(schedule(name, p, m, v), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".png"] * 3
    for name, says in (("absent/a.png", "cannot be written"), ("1f1b.png", "is there already")):
        with pytest.raises(UserError, match=f"^--picture {tmp_path / name}: {says}"):
            picture.png(schedule("1f1b", 1, 1), tmp_path / name)


def test_the_title_of_a_png_of_many_stages_does_not_run_off(tmp_path: Path):
    picture.png(schedule("gpipe", 40, 1), tmp_path / "wide.png")
    title = imread(tmp_path / "wide.png")[:60, :, :3]
    assert title.min() < 0.5  # it is there
    assert title[:, :10].min() == title[:, -10:].min() == 1
