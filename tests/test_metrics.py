"""Metrics: what is written outlives the process, a resume drops what is trained again, the curve shows all."""

import json
import math
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from tensorboardX.proto.event_pb2 import Event

from jaxgpt.config import ModelConfig
from jaxgpt.errors import UserError
from jaxgpt.planner.flops import flops_per_token
from jaxgpt.training import curve, metrics, throughput
from jaxgpt.training.metrics import Metrics


def fill(run: Path, first: int, stop: int) -> None:
    log = Metrics(run, first - 1)
    for step in range(first, stop):
        log.write("train", step, loss=1 / (step + 1), tokens=8 * step)
    log.close()


def events(run: Path) -> list[Event]:
    """All TensorBoard events, files in the order in which they were begun."""
    found = []
    for file in sorted((run / "tensorboard").iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("Q", data[at : at + 8])
            event = Event()
            event.ParseFromString(data[at + 12 : at + 12 + length])
            found.append(event)
            at += 12 + length + 4
    return found


def test_records_outlive_the_process_as_soon_as_they_are_written(tmp_path: Path) -> None:
    log = Metrics(tmp_path, -1)
    log.write("train", 1, loss=2.5, lr=1e-3)
    assert metrics.read(tmp_path) == [{"kind": "train", "step": 1, "loss": 2.5, "lr": 1e-3}]
    log.write("validation", 1, loss=2.75, complete=True)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][1] == {
        "kind": "validation",
        "step": 1,
        "loss": 2.75,
        "complete": True,
    }
    log.close()


def test_resuming_drops_later_records_and_a_line_cut_off(tmp_path: Path) -> None:
    fill(tmp_path, 0, 10)
    file = tmp_path / "metrics.jsonl"
    before = file.read_text()
    file.write_text(before + '{"kind": "train", "step": 1')
    fill(tmp_path, 7, 10)
    assert file.read_text() == before
    assert {entry.name for entry in tmp_path.iterdir()} == {"metrics.jsonl", "tensorboard"}


def test_lines_of_the_user_stay(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('# changed the fan here\n{"kind": "train", "step": 1, "loss": 1.0}\n{"kind": "train", "step": 9}\n')
    Metrics(tmp_path, 5).close()
    assert file.read_text() == '# changed the fan here\n{"kind": "train", "step": 1, "loss": 1.0}\n'
    assert len(metrics.read(tmp_path)) == 1


def test_what_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path: Path) -> None:
    log = Metrics(tmp_path, -1)
    log.write("train", 1, loss=math.nan, grad_norm=math.inf)
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "kind": "train",
        "step": 1,
        "loss": None,
        "grad_norm": None,
    }
    assert math.isnan(metrics.read(tmp_path)[0]["loss"])


def test_tensorboard_has_the_same_values_and_forgets_what_is_trained_again(tmp_path: Path) -> None:
    fill(tmp_path, 1, 6)
    fill(tmp_path, 4, 6)
    found = events(tmp_path)
    assert [event.step for event in found if event.HasField("session_log")] == [1, 4]
    values = [(event.step, event.summary.value[0].tag) for event in found if event.HasField("summary")]
    assert values == [(s, f"train/{name}") for s in (1, 2, 3, 4, 5, 4, 5) for name in ("loss", "tokens")]
    losses = [e.summary.value[0].simple_value for e in found if e.HasField("summary")][::2]
    assert losses[:5] == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6])


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    log = Metrics(tmp_path, -1)
    log._lines.close()
    # Closing the file fails once more, since what was not written is still to be.
    with suppress(OSError), open("/dev/full", "w") as full:
        log._lines = full
        with pytest.raises(UserError, match=r"metrics\.jsonl.*No space left") as caught:
            log.write("train", 1, loss=1.0)
    assert "\n" not in str(caught.value)
    log.close()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file of this name")
    with pytest.raises(UserError, match=r"metrics\.jsonl|tensorboard"):
        Metrics(tmp_path, -1)


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_curve_is_drawn_for_any_number_of_points(tmp_path: Path, steps: int) -> None:
    fill(tmp_path, 1, steps + 1)
    file = curve.draw(tmp_path)
    assert file == tmp_path / "loss.png"
    height, width, _ = imread(file).shape
    assert (width, height) == (960, 540)
    assert not list(tmp_path.glob("*.partial*"))


def drawn(run: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[list[float], list[float]]]:
    """What the curve shows: steps and losses by the first word of the label."""
    seen: dict[str, tuple[list[float], list[float]]] = {}

    def look(figure: Any, target: Path) -> None:
        for line in figure.axes[0].lines:
            seen[line.get_label().split(",")[0]] = (list(line.get_xdata()), list(line.get_ydata()))
        target.write_bytes(b"")

    monkeypatch.setattr(curve.Figure, "savefig", look)
    curve.draw(run)
    return seen


def test_curve_covers_the_whole_history_and_both_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 1, 6)
    log = Metrics(tmp_path, 3)
    log.write("train", 4, loss=math.nan)
    log.write("validation", 4, loss=0.5, tokens=100)
    log.close()
    shown = drawn(tmp_path, monkeypatch)
    assert shown["train"][0] == [1, 2, 3, 4]
    assert shown["train"][1][:3] == [1 / 2, 1 / 3, 1 / 4]
    assert shown["validation"] == ([4], [0.5])


def test_flops_of_a_token_agree_with_the_published_formula() -> None:
    # 72 B s n h^2 (1 + s/6h + V/12nh) counts attention in full; causal attention is (s + 1) / 2s of it.
    h, n, s, v = 1536, 16, 2048, 51200
    model = ModelConfig(width=h, layers=n, heads=16, seq=s, vocab=v)
    attention = s / (6 * h) * (s + 1) / (2 * s)
    assert flops_per_token(model) == pytest.approx(72 * n * h**2 * (1 + attention + v / (12 * n * h)))


def test_flops_count_grouped_queries_gates_and_the_window() -> None:
    model = ModelConfig(width=64, layers=2, heads=4, kv_heads=2, gated=True, mlp_width=96, seq=8, window=3, vocab=10)
    weights = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96) + 64 * 10
    keys = (1 + 2 + 3 * 6) / 8
    assert flops_per_token(model) == pytest.approx(6 * weights + 12 * 2 * 64 * keys)


def test_a_peak_is_named_only_where_it_is_known() -> None:
    assert throughput.peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert throughput.peak_flops("NVIDIA A100-SXM4-40GB", "bf16") == 312e12
    assert throughput.peak_flops("NVIDIA H100 PCIe", "bf16") is None
    assert throughput.peak_flops("NVIDIA H200", "fp32") is None
    assert throughput.peak_flops("cpu", "bf16") is None


def test_pace_leaves_out_what_is_not_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: now[0])
    pace = throughput.Pace(10, 100, tokens_a_step=50, flops_a_second=1e6, flops=1e3)
    now[0] += 4
    with pace.paused():
        now[0] += 100
    now[0] += 6
    speed = pace.read(20)
    assert speed == throughput.Speed(1000.0, 50.0, 0.05, 80.0)
    now[0] += 1
    assert pace.read(22).milliseconds == 500
