"""Presets: published sizes, and the names by which they are found."""

import dataclasses
import json

import pytest

from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.config_file import to_json
from jaxgpt.errors import UserError
from jaxgpt.model.parameters import parameter_count
from jaxgpt.presets import PRESETS, preset
from jaxgpt.sharding.mesh import legal_meshes


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("megatron-1.7b", 1.652),
        ("megatron-7.5b", 7.468),
        ("megatron-145.6b", 145.6),
        ("megatron-1008b", 1008),
        ("gpt2-124m", 0.1244),
        ("gpt2-355m", 0.3548),
        ("gpt2-774m", 0.7740),
        ("gpt2-1.5b", 1.558),
        ("gpt3-125m", 0.1252),
        ("gpt3-175b", 174.6),
    ],
)
def test_parameters_are_those_published(name, billions):
    assert parameter_count(PRESETS[name].model) / 1e9 == pytest.approx(billions, rel=5e-4)


@pytest.mark.parametrize(("name", "billions"), [("1.7b", 1.7), ("16b", 16), ("70b", 70), ("177b", 177), ("462b", 462)])
def test_megatron_on_h100_is_named_by_its_untied_size(name, billions):
    assert parameter_count(PRESETS[f"megatron-h100-{name}"].model) / 1e9 == pytest.approx(billions, rel=0.05)


def test_smollm2_has_its_published_size():
    assert parameter_count(PRESETS["smollm2-135m"].model) == 134_515_008


def is_gpt(model: ModelConfig) -> bool:
    """Whether the published formula holds: a tied GPT whose heads add up to the width."""
    return model.positions == "learned" and model.tied and model.head_width is None


@pytest.mark.parametrize("name", [name for name, run in PRESETS.items() if is_gpt(run.model)])
def test_parameters_are_as_megatron_counts_them(name):
    """arXiv 2104.04473, which leaves out the last norm."""
    model = PRESETS[name].model
    layers, width = model.layers, model.width
    rest = 13 / (12 * width) + (model.vocab + model.seq) / (12 * layers * width)
    assert parameter_count(model) - 2 * width == pytest.approx(12 * layers * width**2 * (1 + rest), rel=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_on_one_device_and_on_some_mesh_of_eight(name):
    run = preset(name)
    for devices in (1, 8):
        assert legal_meshes(run, devices)
    assert run.warmup < run.steps


def test_the_demo_trains_on_the_mesh_of_the_readme():
    run = preset("demo")
    meshes = legal_meshes(run, 8)
    assert {"pipe": 1, "data": 2, "fsdp": 2, "context": 1, "tensor": 2} in meshes


def test_a_file_is_a_preset(tmp_path):
    path = tmp_path / "mine.json"
    run = dataclasses.replace(PRESETS["demo"], steps=7)
    path.write_text(to_json(run))
    assert preset(str(path)) == run


def test_an_unknown_preset_names_the_closest():
    with pytest.raises(UserError, match="--preset gpt2-124: no such preset; did you mean gpt2-124m"):
        preset("gpt2-124")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1, 2]", "not a configuration"),
        (b"{", "not a configuration"),
        (json.dumps({"model": {"widht": 3}}).encode(), "widht"),
        (json.dumps({"model": {"heads": 5}}).encode(), "--heads 5"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, content, says):
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        preset(str(path))
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_presets_say_what_they_are_called_after_the_model_alone():
    assert all(isinstance(run, RunConfig) and run.mesh == "" and run.data == "stdlib" for run in PRESETS.values())
