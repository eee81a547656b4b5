"""The mesh: its text, what is refused before anything is built, and where devices lie."""

import dataclasses
import math
import os
import subprocess
import sys
from dataclasses import dataclass

import jax
import pytest
from jax.sharding import AxisType

from jaxgpt.config import ModelConfig, RunConfig, padded_vocabulary
from jaxgpt.errors import UserError
from jaxgpt.sharding import mesh

pytestmark = pytest.mark.core

MODEL = ModelConfig(layers=2, width=192, heads=12, kv_heads=4, vocab=1000, seq=32)
RUN = RunConfig(model=MODEL, global_batch=16)


@dataclass(frozen=True)
class Fake:
    """A device that is not there."""

    id: int
    process_index: int = 0
    platform: str = "gpu"


def sizes(text: str) -> mesh.Sizes:
    return mesh.parse(text)


def refused(*args, call=mesh.parse) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


# The text


def test_parse_fills_the_axes_that_are_not_named():
    assert mesh.parse("tensor=2, data=4", 8) == {"pipe": 1, "data": 4, "fsdp": 1, "context": 1, "tensor": 2}


@pytest.mark.parametrize(
    ("text", "devices", "meant"),
    [
        ("", 8, "data=8"),
        ("  ", 3, "data=3"),
        ("data=-1,tensor=2", 8, "data=4,tensor=2"),
        ("fsdp=-1", 1, "data=1"),
        ("tensor=4,pipe=2,data=-1", 8, "pipe=2,tensor=4"),
        ("fsdp=2,context=1", 2, "fsdp=2"),
        ("data=4", None, "data=4"),
    ],
)
def test_parse_resolves(text, devices, meant):
    assert mesh.format_mesh(mesh.parse(text, devices)) == meant


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data=2,tensr=4", "'tensr' is not an axis; did you mean tensor? known are pipe, data, fsdp, context, tensor"),
        ("Data=8", "did you mean data?"),
        ("xyzzy=8", "'xyzzy' is not an axis; known are"),
        ("expert=8", "no expert axis"),
        ("data=2,data=4", "data is given twice"),
        ("data=0", "positive"),
        ("data=-2", "positive"),
        ("data=two", "positive"),
        ("data=4.0", "positive"),
        ("data=", "positive"),
        ("data", "'data' is not axis=size"),
        ("=8", "'=8' is not axis=size"),
        ("data=8,", "'' is not axis=size"),
        ("data=-1,fsdp=-1", "only one size may be -1, not data and fsdp"),
        ("data=9999999,fsdp=9999999", "allowed"),
        ("data=-1,tensor=3", "must divide the 8 devices"),
        (
            "data=2;tensor=4",
            "the size of data, '2;tensor=4', must be a positive whole number, or -1 once; axes are parted",
        ),
        ("data=3", "the product 3 is not the number of devices, 8; nearest for 8 devices: data=8"),
        ("data=3,tensor=2", "nearest for 8 devices: data=4,tensor=2 or data=2,tensor=4 or data=8"),
    ],
)
def test_parse_refuses(text, says):
    message = refused(text, 8)
    assert says in message
    assert text in message


@pytest.mark.parametrize("text", ["", "data=-1"])
def test_an_open_mesh_needs_the_number_of_devices(text):
    assert "the number of devices is not known" in refused(text, None)
    assert mesh.devices_named(text) is None


def test_devices_named():
    assert mesh.devices_named("data=2,fsdp=2,tensor=3") == 12


@pytest.mark.parametrize("devices", [1, 2, 6, 8, 60])
def test_format_and_parse_are_inverse_on_every_mesh(devices):
    one = ModelConfig(width=60, heads=60, kv_heads=60, head_width=1, mlp_width=60, vocab=1)
    meshes = mesh.legal_meshes(RunConfig(model=one, global_batch=60), devices)
    assert meshes
    for each in meshes:
        assert mesh.parse(mesh.format_mesh(each), devices) == each


# Divisibility


@pytest.mark.parametrize(
    ("text", "model", "batch", "micro", "says"),
    [
        ("tensor=8", {}, 16, None, "tensor=8 must divide --heads 12"),
        ("tensor=6", {}, 16, None, "tensor=6 must divide --kv-heads 4, or be a multiple of it"),
        ("tensor=4", {"mlp_width": 510}, 16, None, "tensor=4 must divide the feed-forward width (mlp_width) 510"),
        ("tensor=12", {"mlp_width": 768}, 16, None, "tensor x pipe = 12 must divide the padded --vocab 1024"),
        ("fsdp=5", {}, 20, None, "fsdp=5 must divide --width 192"),
        ("data=4,fsdp=2", {}, 12, None, "--global-batch 12: must be a multiple of data x fsdp = 8"),
        ("data=4", {}, 24, 4, "--micro-batch 4: must divide a device's share of --global-batch, 6, such as 2"),
        ("pipe=8", {}, 16, None, "--layers 4: must be at least the 8 parts of pipe=8 (--mesh pipe=8); nearest for 8"),
        ("pipe=3", {"layers": 3}, 16, None, "divide the padded --vocab 1024, as it does for --vocab 1152"),
        ("pipe=2,data=2", {}, 16, 3, "--micro-batch 3: must divide a device's share of --global-batch, 8"),
        ("context=3", {}, 16, None, "2 x context = 6 must divide --seq 64"),
        ("context=2", {"window": 8}, 16, None, "context must be 1 for a model with a window, 8"),
    ],
)
def test_check_refuses(text, model, batch, micro, says):
    chosen = ModelConfig(**{"width": 192, "heads": 12, "kv_heads": 4, "vocab": 1000, **model})
    config = RunConfig(model=chosen, global_batch=batch, micro_batch=micro)
    message = refused(config, sizes(text), call=mesh.check)
    assert says in message
    assert f"--mesh {text}" in message


@pytest.mark.parametrize(
    ("text", "fields", "says"),
    [
        ("data=8,fsdp=5", {"zero": 1, "global_batch": 40}, "fsdp x data = 40 must divide --width 192"),
        ("tensor=3", {"sequence_parallel": True}, "context x tensor = 3 must divide --seq 32 with --sequence-parallel"),
    ],
)
def test_check_refuses_what_zero_and_sequence_parallelism_cannot_divide(text, fields, says):
    config = RunConfig(model=dataclasses.replace(MODEL, kv_heads=12, vocab=192), **{"global_batch": 16, **fields})
    assert says in refused(config, sizes(text), call=mesh.check)


@pytest.mark.parametrize(
    ("text", "fields", "says"),
    [
        ("pipe=2", {"stages": "3,4"}, "--stages 3,4: must sum to --layers 8, not to 7"),
        ("pipe=2", {"stages": "2,3,3"}, "--stages 2,3,3: must name the 2 parts of pipe=2"),
        (
            "pipe=2",
            {"stages": "4,four"},
            '--stages 4,four: must be "auto", or the layers of each stage, each at least 1',
        ),
        ("pipe=2", {"stages": "8,0"}, '--stages 8,0: must be "auto", or the layers of each stage, each at least 1'),
        ("pipe=2", {"virtual_stages": 2}, "--virtual-stages 2: only --schedule interleaved on a mesh with pipe > 1"),
        ("pipe=2", {"virtual_stages": 2, "schedule": "gpipe"}, "only --schedule interleaved"),
        ("data=2", {"virtual_stages": 2, "schedule": "interleaved"}, "only --schedule interleaved on a mesh with pipe"),
        ("pipe=2", {"schedule": "interleaved"}, "--virtual-stages 1: --schedule interleaved needs at least 2"),
        (
            "pipe=4",
            {"schedule": "interleaved", "virtual_stages": 3},
            "--virtual-stages 3: pipe=4 x 3 are 12 parts, more than --layers 8; give at most 2 (--mesh pipe=4)",
        ),
        (
            "pipe=4,data=2",
            {"schedule": "interleaved", "virtual_stages": 2, "micro_batch": 4},
            "--schedule interleaved: pipe=4 must divide the 2 microbatches (--mesh pipe=4,data=2)",
        ),
        (
            "pipe=2,context=2",
            {"context_attention": "ring"},
            "--context-attention ring: not over pipe=2, since a ring's permutes wait for all devices",
        ),
    ],
)
def test_check_refuses_what_a_pipeline_cannot(text, fields, says):
    config = RunConfig(model=dataclasses.replace(MODEL, layers=8), **{"global_batch": 16, **fields})
    assert says in refused(config, sizes(text), call=mesh.check)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("pipe=4,data=2", {"stages": "1,2,2,3"}),
        ("pipe=4", {"schedule": "interleaved", "virtual_stages": 2, "stages": "1,1,1,1,1,1,1,1"}),
        ("pipe=2,context=2", {}),
        ("pipe=8", {"schedule": "zero-bubble", "micro_batch": 16}),
    ],
)
def test_check_allows_what_a_pipeline_can(text, fields):
    config = RunConfig(model=dataclasses.replace(MODEL, layers=8), **{"global_batch": 16, **fields})
    assert mesh.check(config, sizes(text)) == []


def test_the_error_names_legal_meshes_of_as_many_devices_nearest_first():
    message = refused(RUN, sizes("tensor=8"), call=mesh.check)
    texts = message.partition("nearest for 8 devices: ")[2].split(" or ")
    assert texts == ["data=2,tensor=4", "pipe=2,tensor=4", "fsdp=2,tensor=4"]
    for text in texts:
        mesh.check(RUN, mesh.parse(text, 8))


@pytest.mark.parametrize(("vocab", "parts"), [(1000, 3), (50257, 5), (8000, 7), (100, 48)])
def test_the_vocabulary_that_is_named_is_the_smallest_that_so_many_parts_divide(vocab, parts):
    config = RunConfig(model=ModelConfig(layers=parts, vocab=vocab, width=128, heads=4), global_batch=16)
    message = refused(config, sizes(f"pipe={parts}"), call=mesh.check)
    found = int(message.partition("as it does for --vocab ")[2].partition(";")[0])
    smaller = [each for each in range(vocab, found - 512) if padded_vocabulary(each) % parts == 0]
    assert padded_vocabulary(found) % parts == 0 and found >= vocab and not smaller


def test_where_no_mesh_is_legal_the_error_says_so():
    message = refused(RUN, sizes("data=7"), call=mesh.check)
    assert message.endswith(
        "no mesh of 7 devices fits this model and batch; change their sizes, or the number of devices"
    )


def test_legal_meshes_are_exactly_those_that_check_allows():
    legal = [
        mesh.format_mesh(each) for each in mesh.legal_meshes(RunConfig(model=MODEL, global_batch=6, micro_batch=3), 4)
    ]
    # data x fsdp = 4 does not divide the batch of 6; 2 leaves 3, which one microbatch of 3 takes
    splits = [text for text in legal if "context" not in text and "pipe" not in text]
    assert sorted(splits) == ["data=2,tensor=2", "fsdp=2,tensor=2", "tensor=4"]
    assert "context=2,tensor=2" in legal
    # of the two layers, two stages can have one each
    assert [text for text in legal if "pipe" in text] == [
        f"pipe=2,{other}=2" for other in ("tensor", "context", "fsdp", "data")
    ]


def test_every_legal_mesh_has_the_devices_asked_for():
    meshes = mesh.legal_meshes(RunConfig(model=MODEL, global_batch=64), 64)
    assert len({mesh.format_mesh(each) for each in meshes}) == len(meshes)
    assert {math.prod(each.values()) for each in meshes} == {64}


def test_fewer_key_value_heads_than_tensor_are_replicated_and_that_is_said():
    config = RunConfig(model=ModelConfig(width=192, heads=12, kv_heads=2), global_batch=8)
    assert mesh.check(config, sizes("tensor=2")) == []
    (note,) = mesh.check(config, sizes("tensor=4"))
    assert note == "2 key-value heads on tensor=4: each is held and computed on 2 devices"


# The devices


def test_build_has_all_axes_explicit_and_tensor_innermost():
    devices, note = mesh.prepare_devices(8)
    built = mesh.build(sizes("data=2,fsdp=2,tensor=2"), devices)
    assert note == "no accelerator found: 8 virtual CPU devices"
    assert built.axis_names == mesh.AXES
    assert dict(built.shape) == sizes("data=2,fsdp=2,tensor=2")
    assert set(built.axis_types) == {AxisType.Explicit}
    assert [device.id for device in built.devices[0, 0, 0, 0]] == [0, 1]
    assert [device.id for device in built.devices[0, :, 0, 0, 0]] == [0, 4]


@pytest.mark.parametrize(
    ("text", "a_host", "crosses"),
    [
        ("data=2,fsdp=2,tensor=2", 8, []),
        ("data=2,fsdp=2,tensor=2", 4, ["data"]),
        ("data=2,fsdp=2,tensor=2", 2, ["data", "fsdp"]),
        ("data=2,fsdp=2,tensor=2", 1, ["data", "fsdp", "tensor"]),
        ("tensor=8", 4, ["tensor"]),
        ("data=4,tensor=2", 4, ["data"]),
    ],
)
def test_crossing_axes(text, a_host, crosses):
    devices = [Fake(id=i, process_index=i // a_host) for i in range(8)]
    shuffled = devices[5:] + devices[:5]  # the order that is given does not matter
    assert mesh.crossing_axes(mesh.build(sizes(text), shuffled)) == crosses


def test_a_host_holds_whole_tensor_groups():
    devices = [Fake(id=i, process_index=i % 2) for i in range(8)]  # ids alternate between two hosts
    built = mesh.build(sizes("data=4,tensor=2"), devices)
    assert mesh.crossing_axes(built) == ["data"]


def test_accelerators_are_taken_from_the_first_on():
    there = [Fake(id=i) for i in (2, 0, 3, 1)]
    devices, note = mesh.take(there, 2)
    assert [device.id for device in devices] == [0, 1]
    assert note == "2 of 4 devices are used"
    assert mesh.take(there, None)[1] is None
    assert "--mesh of 8 devices: there are 4" in refused(there, 8, call=mesh.take)


def test_fewer_virtual_devices_than_named():
    message = refused(9, call=mesh.prepare_devices)
    assert "--mesh of 9 devices: JAX has already started with 8" in message
    assert "jaxgpt.use_devices(9)" in message
    assert "2048" in refused(4096, call=mesh.prepare_devices)


def test_use_devices():
    mesh.use_devices(8)
    assert "already started with 8" in refused(9, call=mesh.use_devices)
    assert "use_devices 0" in refused(0, call=mesh.use_devices)


def test_all_devices_where_none_are_named():
    assert mesh.prepare_devices(None)[0] == jax.devices()


FRESH = """
from jaxgpt.sharding.mesh import prepare_devices
print(len(prepare_devices(3)[0]), len(prepare_devices(5)[0]))
"""


def test_virtual_devices_are_made_before_jax_starts_and_never_fewer_than_the_user_set():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=5"}
    done = subprocess.run([sys.executable, "-c", FRESH], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "5"]


def test_what_does_nothing_is_said():
    pipeline = RunConfig(schedule="gpipe")
    assert mesh.check(pipeline, mesh.parse("data=2")) == ["--schedule gpipe: does nothing without a pipe axis"]
    assert not mesh.check(pipeline, mesh.parse("pipe=2"))
    split = RunConfig(layout="vocab=none")
    assert "over pipe the vocabulary lies split" in mesh.check(split, mesh.parse("pipe=2,tensor=2"))[0]


@pytest.mark.parametrize(
    ("text", "fields", "says"),
    [
        ("tensor=2", {"zero": 2}, ["--zero 2: does nothing without a data axis"]),
        ("data=2", {"context_attention": "ring"}, ["--context-attention ring: does nothing without a context axis"]),
        ("data=2", {"sequence_parallel": True}, ["--sequence-parallel: does nothing without a tensor axis"]),
        (
            "data=2",
            {"zero": 3, "layout": "embed=none"},
            ["--zero 3: does nothing, since --layout embed=none takes its place"],
        ),
        ("data=2", {"zero": 3, "layout": "embed=data"}, ["--layout embed=data: changes nothing on this mesh"]),
        (
            "tensor=2",
            {"sequence_parallel": True, "layout": "seq=none"},
            ["--sequence-parallel: does nothing, since --layout seq=none takes its place"],
        ),
        (
            "data=2,tensor=2",
            {"layout": "mlp=none,heads=tensor,embed=fsdp"},
            [f"--layout {row}: changes nothing on this mesh" for row in ("heads=tensor", "embed=fsdp")],
        ),
        ("data=2,tensor=2", {"zero": 1, "sequence_parallel": True, "layout": "mlp=none"}, []),
        ("pipe=2", {"layout": "vocab=none"}, ["--layout vocab=none: over pipe the vocabulary lies split all the same"]),
    ],
)
def test_a_flag_or_row_that_changes_nothing_is_said(text: str, fields: dict[str, object], says: list[str]):
    assert mesh.check(dataclasses.replace(RUN, **fields), sizes(text)) == says
