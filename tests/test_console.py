"""Console: one line a message where there is no terminal, nothing lost or reinterpreted, the same facts on one."""

import io
from contextlib import redirect_stdout, suppress

import pytest

from jaxgpt.training.console import Console, duration, size, step_line
from jaxgpt.training.throughput import Speed

ROWS = [("blocks.attention [q, k]", 1234567, "S(0)"), ("embedding", 8, "B")]


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return FakeTerminal()


def test_a_long_message_stays_one_line_without_control_codes(capsys: pytest.CaptureFixture[str]) -> None:
    Console().say("mesh [data=2] " + "x" * 500)
    Console().fallback("attention: XLA [bold]in place of[/bold] cuDNN")
    assert capsys.readouterr().out.splitlines() == [
        "mesh [data=2] " + "x" * 500,
        "attention: XLA [bold]in place of[/bold] cuDNN",
    ]


def test_a_plain_table_aligns_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Console().table("parameters", ROWS)
    assert capsys.readouterr().out.splitlines() == [
        "parameters",
        "  blocks.attention [q, k]  1,234,567  S(0)",
        "  embedding                        8  B",
    ]


def test_what_would_command_a_terminal_or_cannot_be_spelt_is_replaced() -> None:
    raw = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(raw, encoding="ascii")):
        Console().say("a\x1b[2Jbc\nd \u4e2d")
        assert raw.getvalue() == b"a?[2Jbc\nd ?\n"


def test_rows_of_different_lengths_and_no_rows_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    Console().table("mesh", [("data", 2), ("4 devices",)])
    Console().table("nothing", [])
    assert capsys.readouterr().out.splitlines() == ["mesh", "  data       2", "  4 devices", "nothing"]


def test_a_table_on_a_terminal_has_the_same_cells(terminal: FakeTerminal) -> None:
    with redirect_stdout(terminal):
        Console().table("parameters", ROWS)
    for text in ("parameters", "blocks.attention [q, k]", "1,234,567", "S(0)", "embedding"):
        assert text in terminal.getvalue()


def test_each_step_is_a_line_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Console().progress(200) as progress:
        progress.step(10, 5.25, Speed(312.4, 13107.2, None, 59.4))
        progress.step(20, 4.5, Speed(12.345, 1e6, 0.4123, 7260))
    assert capsys.readouterr().out.splitlines() == [
        "step  10/200  loss 5.2500  312 ms  13,107 tokens/s  59 s left",
        "step  20/200  loss 4.5000  12.3 ms  1,000,000 tokens/s  MFU 41.2 %  2 h 01 min left",
    ]


def test_the_line_on_a_terminal_is_redrawn_below_messages(terminal: FakeTerminal) -> None:
    with redirect_stdout(terminal):
        console = Console()
        with console.progress(200) as progress:
            progress.step(10, 5.25, Speed(312, 13107, None, 59))
            console.say("validation 4.9")
            progress.step(20, 4.5, Speed(312, 13107, None, 59))
    text = terminal.getvalue()
    assert "loss 5.2500" in text
    assert "validation 4.9" in text
    assert "loss 4.5000" in text
    assert "\x1b[" in text
    assert text.count("\n") < 8


def test_the_terminal_is_left_as_it_was_after_an_error(terminal: FakeTerminal) -> None:
    with redirect_stdout(terminal), suppress(KeyError), Console().progress(2) as progress:
        progress.step(1, 1.0, Speed(1, 1, None, 1))
        raise KeyError
    assert terminal.getvalue().rstrip().endswith("\x1b[?25h")


def test_a_loss_that_is_no_number_is_shown() -> None:
    assert "loss nan" in step_line(1, 2, float("nan"), Speed(1, 1, None, 0))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (7860, "2 h 11 min"),
        (90000, "1 d 01 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3.0 TiB")])
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text
