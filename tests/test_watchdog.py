"""The watchdog: what it lets pass, when it ends a process, and what it says then. No test waits for a time to pass."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from bigram import start

from jaxgpt.training import checkpoint, watchdog
from jaxgpt.training.watchdog import STATUS, STEP, STOPPED, UNKNOWN, Watchdog

pytest_plugins = ["run_fixtures"]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watching(run: Path, clock: Clock) -> Watchdog:
    return Watchdog(run, factor=3.0, every=2, clock=clock)


def late(dog: Watchdog, clock: Clock, seconds: float) -> str | None:
    """What it says after so many seconds, in which it has looked all the time."""
    said = None
    while seconds > 0:
        clock.now += min(seconds, STOPPED)
        seconds -= STOPPED
        said = dog.look()
    return said


def steps(dog: Watchdog, clock: Clock, seconds: float, count: int) -> None:
    for step in range(1, count + 1):
        clock.now += seconds
        dog.stepped(step)


def test_a_step_may_take_so_many_times_the_median_and_the_steps_between_two_readings(
    tmp_path: Path, clock: Clock
) -> None:
    dog = watching(tmp_path, clock)
    steps(dog, clock, 100.0, 5)
    dog.look()
    assert late(dog, clock, 500.0) is None
    assert late(dog, clock, 0.1) == "step after step 5 has taken 500 s, and may take 500 s"
    dog.stepped(6)
    assert dog.look() is None
    assert dog.limit() == ("step", 500.0)  # one slow step moves no median


def test_steps_read_together_count_as_so_many(tmp_path: Path, clock: Clock) -> None:
    dog = watching(tmp_path, clock)
    for step in (10, 20, 30):
        clock.now += 2000.0
        dog.stepped(step)
    assert dog.limit() == ("step", 5 * 200.0)


def test_quick_steps_and_first_steps_have_time(tmp_path: Path, clock: Clock) -> None:
    dog = watching(tmp_path, clock)
    assert dog.limit() == ("step", UNKNOWN)
    steps(dog, clock, 0.01, 5)
    assert dog.limit() == ("step", STEP)


def test_other_phases_are_no_steps_time_and_have_their_own(tmp_path: Path, clock: Clock) -> None:
    dog = watching(tmp_path, clock)
    steps(dog, clock, 200.0, 4)
    dog.look()
    with dog.phase("validate"):
        assert late(dog, clock, UNKNOWN) is None
        dog.beat()
        assert late(dog, clock, UNKNOWN) is None
        with dog.phase("save"):
            assert late(dog, clock, 2 * UNKNOWN) is None
        said = late(dog, clock, 1.0)
        assert said == f"validate after step 4 has taken {UNKNOWN + 1:.0f} s, and may take {UNKNOWN:.0f} s"
    with dog.phase("compile"):
        assert late(dog, clock, 100 * UNKNOWN) is None
    assert dog.look() is None
    assert late(dog, clock, 200.0) is None
    dog.stepped(5)
    assert dog.limit() == ("step", 1000.0)


def test_reading_is_a_phase_and_what_is_done_with_a_batch_is_not(tmp_path: Path, clock: Clock) -> None:
    dog = watching(tmp_path, clock)

    def batches() -> Iterator[str]:
        for _ in range(2):
            yield dog.limit()[0]

    assert [(inside, dog.limit()[0]) for inside in dog.each("read batch", batches())] == 2 * [("read batch", "step")]
    assert dog.limit()[0] == "step"


def test_what_it_says_at_the_end(tmp_path: Path, clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    left: list[int] = []
    dog = Watchdog(tmp_path, 3.0, 2, lambda: ["4 x all-reduce over data"], clock, left.append)
    dog.stepped(7)
    with dog.phase("save"):
        dog.end("process 3 is gone")
        dog.end("process 2 is gone, too")
    assert left == [STATUS]
    said = capfd.readouterr().err
    assert "jaxgpt: error: process 3 is gone; in phase save in step, after step 7; the run can be resumed" in said
    assert "process 2" not in said
    (file,) = (tmp_path / "faults").glob("stacks-step-7-process-*.txt")
    for text in (said, file.read_text()):
        assert "test_what_it_says_at_the_end" in text
    assert file.read_text().endswith("4 x all-reduce over data\n")


def test_it_ends_though_nothing_can_be_written(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "faults").write_text("in the way")
    left: list[int] = []
    Watchdog(tmp_path, 3.0, 2, list, clock, left.append).end("a disk is full")
    assert left == [STATUS]


def test_its_thread_ends_a_process_whose_clock_says_so(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "POLL", 0.01)
    ended = threading.Event()
    with Watchdog(tmp_path, 3.0, 2, list, clock, lambda status: ended.set()):
        while not ended.wait(0.02):
            clock.now += 10.0
    assert clock.now > UNKNOWN


def test_a_process_that_was_stopped_itself_is_not_late(tmp_path: Path, clock: Clock) -> None:
    dog = watching(tmp_path, clock)
    steps(dog, clock, 100.0, 5)
    assert dog.look() is None
    with dog.phase("save"):
        clock.now += 1e6
        assert dog.look() is None
    assert dog.look() is None
    clock.now += 1e6
    assert dog.look() is None
    assert late(dog, clock, 501.0) is not None


def test_without_a_factor_nothing_is_watched(tmp_path: Path, clock: Clock) -> None:
    before = threading.active_count()
    with Watchdog(tmp_path, 0.0, clock=clock):
        assert threading.active_count() == before


def test_a_run_whose_step_hangs_is_ended_and_says_where(data: Path, tmp_path: Path) -> None:
    where = tmp_path / "run"
    with start(where, data, hang=3, patience=1.0, steps=40, log_every=1, save_every=1) as process:
        said, _ = process.communicate(timeout=300)
    assert process.returncode == STATUS, said
    assert "jaxgpt: error: step after step 3 has taken" in said
    assert "hanging_step" in said
    assert checkpoint.steps(where / "checkpoints")
    (file,) = (where / "faults").glob("stacks-*")
    assert "hanging_step" in file.read_text()
