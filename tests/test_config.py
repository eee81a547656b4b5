"""What a user may say: values that are refused where they enter, and the way to JSON and back."""

import dataclasses
import json

import pytest

from jaxgpt.config import ModelConfig, RopeScaling, RunConfig, padded_vocabulary
from jaxgpt.config_file import differences, from_json, to_json
from jaxgpt.errors import UserError
from jaxgpt.presets import PRESETS


@pytest.mark.parametrize("vocab", [1, 17, 64, 256, 1024, 8192, 8193, 50257, 128256])
@pytest.mark.parametrize("devices", [1, 2, 8, 64])
def test_the_vocabulary_is_padded_for_every_mesh(vocab, devices):
    padded = padded_vocabulary(vocab)
    assert padded % devices == 0
    assert vocab <= padded < vocab + 512


def test_a_large_vocabulary_is_padded_for_512_devices():
    assert padded_vocabulary(50257) % 512 == 0


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("layers", 0, "--layers 0"),
        ("width", -1, "--width -1"),
        ("heads", 5, "--heads 5: must divide --width 128"),
        ("kv_heads", 3, "--kv-heads 3: must divide --heads 4; take one of 1, 2, 4"),
        ("vocab", 0, "--vocab 0"),
        ("seq", 0, "--seq 0"),
        ("dropout", 1.0, "--dropout 1.0"),
        ("dropout", -0.1, "--dropout -0.1"),
        ("attention_dropout", 0.1, "--attention-dropout 0.1"),
        ("window", 0, "--window 0"),
    ],
)
def test_a_model_refuses(field, value, says):
    with pytest.raises(UserError, match=says):
        ModelConfig(**{field: value})


def test_rotation_needs_two_dimensions():
    with pytest.raises(UserError, match="rotates no dimension"):
        ModelConfig(positions="rotary", rope_fraction=0.01)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("seed", -1),
        ("seed", 2**32),
        ("global_batch", 0),
        ("micro_batch", 0),
        ("lr", 0.0),
        ("min_lr", -1e-4),
        ("min_lr", 2e-3),
        ("warmup", -1),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("epsilon", 0.0),
        ("clip", -1.0),
        ("weight_decay", -0.1),
        ("validation", 0.0),
        ("validation", 1.0),
        ("decay", 0.0),
        ("log_every", 0),
        ("eval_every", -1),
        ("keep", 0),
        ("profile", "10"),
        ("profile", "13:10"),
        ("profile", "a:b"),
    ],
)
def test_a_run_refuses_and_names_the_flag_and_the_value(field, value):
    with pytest.raises(UserError) as caught:
        RunConfig(**{field: value})
    assert str(caught.value).startswith(f"--{field.replace('_', '-')} {value}: must be ")


def test_a_constant_rate_falls_to_nothing_so_min_lr_may_be_anything():
    assert RunConfig(lr=1e-3, min_lr=1e-2, lr_schedule="constant").min_lr == 1e-2


def test_what_is_not_said_follows():
    model = ModelConfig(width=576, heads=9, kv_heads=3, gated=True)
    assert (model.head, model.kv, model.mlp) == (64, 3, 1536)
    assert ModelConfig(width=100, heads=2, head_width=32).head == 32
    assert ModelConfig(width=128).mlp == 512
    assert RunConfig(profile="10:13").profile_steps() == (10, 13)


@pytest.mark.parametrize("run", PRESETS.values(), ids=PRESETS)
def test_json_there_and_back(run):
    assert from_json(to_json(run), "here") == run


def test_json_keeps_what_is_nested():
    scaled = ModelConfig(positions="rotary", rope_scaling=RopeScaling(kind="llama3", factor=8.0))
    assert from_json(to_json(RunConfig(model=scaled)), "here").model == scaled


@pytest.mark.parametrize(
    ("change", "says"),
    [({"colour": 1}, "colour"), ({"model": 3}, "not a configuration"), ({"steps": 0}, "--steps 0")],
)
def test_json_that_is_no_configuration_names_the_file(change, says):
    fields = json.loads(to_json(RunConfig())) | change
    with pytest.raises(UserError) as caught:
        from_json(json.dumps(fields), "runs/mine/config.json")
    assert str(caught.value).startswith("runs/mine/config.json: ")
    assert says in str(caught.value)


def test_differences_name_fields_of_run_and_model():
    ours = RunConfig(steps=5)
    theirs = dataclasses.replace(ours, steps=6, mesh="data=2", model=ModelConfig(layers=2))
    assert differences(ours, theirs) == ["mesh: , data=2", "steps: 5, 6", "model.layers: 4, 2"]
    assert differences(ours, theirs, frozenset({"steps", "mesh"})) == ["model.layers: 4, 2"]
    assert differences(ours, ours) == []


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("model.positions", "alibi", 'positions "alibi": must be one of "learned", "rotary"'),
        ("model.tied", "no", 'tied "no": must be true or false'),
        ("model.layers", 2.5, "layers 2.5: must be a whole number"),
        ("model.window", 2.5, "window 2.5: must be a whole number or null"),
        ("model.rope_base", -5.0, "rope_base -5.0: must be above 0 and finite"),
        ("model.rope_scaling", {"factor": 0.0}, "rope_scaling.factor 0.0: must be above 0"),
        ("sequence_parallel", "false", "must be true or false"),
        ("dtype", "fp8", 'dtype "fp8": must be one of "auto", "bf16", "fp32"'),
        ("zero", 7, "zero 7: must be one of 0, 1, 2, 3"),
        ("zero", True, "zero true: must be one of 0, 1, 2, 3"),
        ("steps", 3.5, "steps 3.5: must be a whole number"),
        ("data", 5, "data 5: must be a text"),
        ("lr", "fast", 'lr "fast": must be a finite number'),
    ],
)
def test_a_file_says_no_more_than_flags_can(path, value, says):
    fields = json.loads(to_json(RunConfig()))
    *parents, last = path.split(".")
    place = fields
    for parent in parents:
        place = place[parent]
    place[last] = value
    with pytest.raises(UserError) as caught:
        from_json(json.dumps(fields), "mine.json")
    assert says in str(caught.value)
    assert str(caught.value).startswith("mine.json: ")


def test_every_field_comes_back_from_a_file():
    scaled = ModelConfig(positions="rotary", rope_scaling=RopeScaling(kind="llama3", factor=8.0), window=5, kv_heads=2)
    config = RunConfig(model=scaled, micro_batch=2, zero=2, sequence_parallel=True)
    assert from_json(to_json(config), "mine.json") == config
