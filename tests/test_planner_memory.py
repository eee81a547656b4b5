"""Memory predicted against what was compiled for absent H100s (experiments/plan_memory.py), and against formulas."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxgpt.planner.estimate import estimate
from jaxgpt.planner.hardware import HostMemory, find
from jaxgpt.planner.memory import MARGIN, fits
from jaxgpt.planner.plan import Plan
from jaxgpt.presets import preset

COMPILED = json.loads((Path(__file__).parents[1] / "experiments" / "results" / "plan_memory.json").read_text())["rows"]
H100 = find("h100")


def predicted(row):
    return estimate(preset(row["model"]).model, Plan.from_json(row["choices"], row["plan"]), H100, row["batch"])


@pytest.mark.parametrize("row", COMPILED, ids=lambda row: row["plan"])
def test_peak_is_the_compilers(row):
    found = predicted(row)
    assert found.peak_bytes == pytest.approx(row["compiled"]["peak"], rel=0.15)
    assert not found.fits or row["compiled"]["peak"] <= H100.memory


def test_peaks_are_close_on_average():
    assert len(COMPILED) >= 25
    errors = [abs(predicted(row).peak_bytes / row["compiled"]["peak"] - 1) for row in COMPILED]
    assert sum(errors) / len(errors) < 0.07


def test_fits_keeps_a_margin():
    assert fits(round(H100.memory / (1 + MARGIN)) - 1, H100)
    assert not fits(round(H100.memory / (1 + MARGIN)) + 1, H100)


def test_state_is_zeros_formula():
    """18, 6 + 12/N and 2 + 16/N bytes a parameter, with fp32 gradients."""
    model, n = preset("gpt3-6.7b").model, 8
    entries = sum((12 * model.layers * model.width**2, model.width * (model.padded_vocab + model.seq)))
    for zero, a_parameter in ((0, 18), (1, 6 + 12 / n), (2, 2 + 16 / n)):
        found = estimate(model, Plan(data=n, zero=zero), H100, n).memory
        state = found.parameters + found.gradients + found.optimizer
        assert state == pytest.approx(a_parameter * entries, rel=0.01)


def test_microbatches_that_wait_are_held():
    model = preset("gpt3-6.7b").model
    plan = Plan(pipe=8, schedule="gpipe")
    few, many = (estimate(model, plan, H100, m).memory.activations for m in (8, 64))
    assert many == few * 8
    ours = dataclasses.replace(plan, schedule="1f1b")
    assert estimate(model, ours, H100, 64).memory.activations == estimate(model, ours, H100, 512).memory.activations


# In the host's memory


def test_offload_takes_masters_and_moments_to_the_host():
    model = preset("gpt3-6.7b").model
    plan = Plan(data=2, fsdp=4, zero=1)
    here, there = (estimate(model, dataclasses.replace(plan, offload=each), H100, 8) for each in ("none", "optimizer"))
    assert (here.host_bytes, here.time.offload, there.memory.optimizer) == (0, 0, 0)
    assert there.host_bytes == 3 * here.memory.optimizer  # two copies, while they are updated
    state = 12 * here.memory.optimizer // 8
    assert 0.9 * state <= here.peak_bytes - there.peak_bytes <= state
    # 28 bytes a parameter over the link
    assert there.time.offload == pytest.approx(28 * state / 12 / H100.offload.bandwidth)
    assert there.step_seconds == pytest.approx(here.step_seconds + there.time.offload)


def test_what_the_host_has_no_room_for_does_not_fit():
    model, plan = preset("gpt2-1.5b").model, Plan(data=8, offload="optimizer")
    small = dataclasses.replace(H100, name="small host", offload=HostMemory(bandwidth=5e10, memory=1e9))
    assert estimate(model, plan, H100, 8).fits
    assert not estimate(model, plan, small, 8).fits


def test_on_cpu_offload_saves_nothing():
    model, cpu = preset("gpt2-124m").model, find("cpu")
    ours, theirs = (estimate(model, Plan(offload=each), cpu, 8, dtype="fp32") for each in ("none", "optimizer"))
    assert (ours.memory, ours.time) == (theirs.memory, theirs.time)
