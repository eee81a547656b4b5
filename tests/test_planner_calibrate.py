"""Calibration on virtual CPU devices: what it measures is used, and stays within what a hardware file may say."""

import json

import jax

from jaxgpt.config import ModelConfig
from jaxgpt.planner.calibrate import calibrated
from jaxgpt.planner.estimate import estimate
from jaxgpt.planner.hardware import find, present
from jaxgpt.planner.plan import Plan


def test_calibrated_hardware_is_a_hardware_file(tmp_path):
    devices = jax.devices()
    stated = present(devices)
    found = calibrated(stated, devices, "fp32")
    path = tmp_path / "here.json"
    path.write_text(json.dumps(found.to_json()))
    again = find(str(path))  # all in range
    assert (again.inside, again.efficiency) == (found.inside, found.efficiency)
    assert found.inside != stated.inside
    assert found.efficiency.inside == 1
    model = ModelConfig(layers=2, width=64, heads=4, seq=64)
    assert estimate(model, Plan(data=8, hardware="cpu"), found, 8, dtype="fp32").step_seconds > 0


def test_one_device_has_no_link_to_measure():
    stated = find("cpu")
    assert calibrated(stated, jax.devices()[:1], "fp32").inside == stated.inside
