"""jaxgpt explain: layouts, memory and communication of meshes of any size, as tables and as JSON, with no device."""

import dataclasses
import json
import math
from fractions import Fraction
from typing import Any, get_args, get_type_hints

import pytest
from tiny import GPT, LLAMA, run_config

from jaxgpt import explained as explaining
from jaxgpt import flags
from jaxgpt.cli import main
from jaxgpt.errors import UserError
from jaxgpt.explained import Explanation, difference, explain, tables, to_json
from jaxgpt.model.parameters import parameters
from jaxgpt.planner import absent
from jaxgpt.presets import preset
from jaxgpt.sharding.jaxprs import branches, inner, live
from jaxgpt.sharding.ledger import Total, totals
from jaxgpt.sharding.ledger_names import dimension_names
from jaxgpt.training import parity

pytestmark = pytest.mark.core


def small(mesh: str, model=GPT, **fields) -> Explanation:
    return explain(run_config(model, mesh=mesh, **fields))


def test_a_mesh_of_4096_devices_and_175_billion_parameters():
    config = dataclasses.replace(preset("gpt3-175b"), mesh="data=8,fsdp=64,tensor=8", sequence_parallel=True)
    found = explain(config)
    assert (found.dtype, math.prod(found.sizes.values())) == ("bf16", 4096)
    whole = {name: 4 * math.prod(p.shape) for name, p in parameters(config.model).items()}
    for each in found.stored:
        parts = (64 if "fsdp" in each.sbp else 1) * (8 if "tensor" in each.sbp else 1)
        assert (each.nbytes, each.optimizer) == (whole[each.name] // parts, 2 * whole[each.name] // parts)
    # Full recomputation keeps the residual stream's share alone: 2 s b h / t a block (arXiv 2205.05198).
    (kept,) = found.kept
    assert (kept.nbytes, kept.turns) == (2 * 2048 * 12288 // 8, 96)
    fsdp = sum(each.nbytes for each in found.stored if "embed" in each.dims) // 2  # in bf16, of the 64th part
    gathers = totals(found.lines)["all-gather", ("fsdp",)]
    assert gathers.received == 3 * 2 * 63 * fsdp - 3 * 63 * (found.stored[0].nbytes + found.stored[1].nbytes) // 2


def test_gradients_and_weights_are_read_from_the_loop():
    (loop,) = small("data=4", micro_batch=4, dtype="bf16").loops
    elements = sum(math.prod(p.shape) for p in parameters(GPT).values())
    vectors = sum(math.prod(p.shape) for p in parameters(GPT).values() if not p.decays)
    scale = 4  # of the loss; tokens are handed in turn by turn
    assert (loop.turns, loop.carried) == (2, 4 * elements + 4)
    assert loop.constant == 2 * (elements - vectors) + 4 * vectors + scale


@pytest.mark.parametrize(
    ("recompute", "names"),
    [("selective", {"qkv", "attended", "attention_sums", "mlp_in", "attention_added"}), ("full", set())],
)
def test_what_is_kept_has_the_names_of_the_policy(recompute: str, names: set[str]):
    found = small("data=2,tensor=2", LLAMA, recompute=recompute, dtype="bf16")
    assert {each.name for each in found.kept} == {"input"} | names
    assert {each.turns for each in found.kept} == {LLAMA.layers}
    rows = dict(tables(found))["kept from forward to backward: bytes a device and block; " + _kept_size(found)]
    assert rows[0][:3] == ("input", "bf16 16 x 16 x 32", "data: S(batch)")


def powers(jaxpr: Any) -> int:
    """Equations of a program that are powers of e, as attention makes of scores, in all that runs inside of it."""
    inside = [part for e in jaxpr.eqns for part in (*branches(e), *(part for part, _ in inner(e)))]
    return sum(e.primitive.name == "exp" for e in jaxpr.eqns) + sum(map(powers, inside))


def test_attention_is_kept_once_and_not_run_again_by_selective_recomputation():
    config = run_config(LLAMA, dtype="bf16")
    found = small("data=2,tensor=2", LLAMA, dtype="bf16")
    heads = [each.name for each in found.kept if each.shape[2:] == (LLAMA.heads, LLAMA.head)]
    assert len(heads) == 2  # queries and the output
    assert heads.count("attended") == 1
    assert [each.dtype for each in found.kept if each.name == "attention_sums"] == ["f32"]
    runs = {}
    for recompute in ("none", "selective", "full"):
        program = parity.program(dataclasses.replace(config, recompute=recompute), "data=1")
        runs[recompute] = powers(live(program.traced.jaxpr))
    assert runs["selective"] == runs["none"] == runs["full"] - 1


def _kept_size(found: Explanation) -> str:
    return explaining.size(sum(each.nbytes * each.turns for each in found.kept)) + " in all blocks"


def test_without_recomputation_nothing_is_kept_whole_under_sequence_parallelism():
    found = small("tensor=4", sequence_parallel=True)
    assert all(str(each.signature) in ("[tensor: S(1)]", "[tensor: S(2)]") for each in found.kept)


def test_every_signature_is_said_by_name():
    found = small("data=2,fsdp=2,tensor=2", zero=1)
    said = {each.name: each.sbp for each in found.stored}
    assert said["embedding.token.weight"] == "tensor: S(vocab), fsdp: S(embed), data: S(embed)"
    assert said["blocks.norm1.scale"] == "B"
    assert said["blocks.attention.query.bias"] == "tensor: S(heads)"


def test_json_has_what_the_tables_have():
    found = small("data=2,tensor=2", sequence_parallel=True)
    document = json.loads(to_json(found))
    assert document["mesh"] == found.sizes
    assert [each["name"] for each in document["parameters"]] == [each.name for each in found.stored]
    assert [each["nbytes"] for each in document["kept"]] == [each.nbytes for each in found.kept]
    assert len(document["communication"]) == len(found.lines)
    for each, line in zip(document["communication"], found.lines, strict=True):
        assert (each["kind"], tuple(each["axes"]), each["times"]) == (line.kind, line.axes, line.times)
        assert each["received"] == line.received
        assert (each["source"]["file"], each["source"]["line"]) == (line.source.file, line.source.line)
    received = sum(each["times"] * each["received"] for each in document["communication"])
    assert sum(each["received"] for each in document["totals"]) == received
    assert document["compiled"] is None


def test_lines_that_differ_in_shape_alone_are_one_row():
    found = small("fsdp=4")
    title, rows = next((t, rows) for t, rows in tables(found) if t.startswith("communication"))
    assert title.endswith("received by each device")
    assert len(rows) < len(found.lines)
    assert rows[0][:2] == ("all-gather", "fsdp")
    gathers = [row for row in rows if row[5] == "gather"]
    assert gathers[0][3].endswith("8 arrays")
    assert gathers[0][6].startswith("pipeline/stage.py:")


@pytest.fixture(scope="module")
def compiled() -> Explanation:
    """One microbatch, in fp32: what a compiler for CPUs leaves as it is."""
    return explain(run_config(GPT, mesh="data=2,fsdp=2"), "cpu")


def test_compiled_for_cpu_what_is_predicted_stands_beside_what_is_found(compiled):
    assert compiled.dtype == "fp32"
    _, rows = next(each for each in tables(compiled) if each[0].startswith("by kind and axes"))
    assert {row[-1] for row in rows} == {"the same"}
    assert {row[:2] for row in rows} >= {
        ("all-gather", "fsdp"),
        ("reduce-scatter", "fsdp"),
        ("all-reduce", "data, fsdp"),
    }
    document = json.loads(to_json(compiled))["compiled"]
    assert document["arguments"] > 3 * sum(each.nbytes for each in compiled.stored)


def test_a_collective_that_was_not_predicted_shows_as_a_difference(compiled):
    extra = dataclasses.replace(
        compiled, lines=[each for each in compiled.lines if each.kind != "reduce-scatter"] + compiled.lines[:1]
    )
    _, rows = next(each for each in tables(extra) if each[0].startswith("by kind and axes"))
    assert {row[0]: row[-1] for row in rows if row[-1] != "the same"}.keys() >= {"reduce-scatter"}
    assert difference(Total(), Total(1, 8, Fraction(8))) == "not predicted"
    assert difference(Total(1, 8, Fraction(8)), Total()) == "-100 %"
    assert difference(Total(1, 200, Fraction(200)), Total(1, 202, Fraction(202))) == "+1 %"


# The command line


def test_the_verb_prints_tables_or_json(capsys):
    tiny = "--layers 1 --width 32 --heads 4 --kv-heads 2 --vocab 64 --seq 16 --mesh data=2,tensor=2".split()
    assert main(["explain", *tiny]) == 0
    out = capsys.readouterr().out
    assert "blocks.mlp.up.weight" in out
    assert "tensor: S(mlp)" in out
    assert "model/gpt.py:" in out
    assert main(["explain", *tiny, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mesh"]["tensor"] == 2


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ("", "--mesh '': the number of devices is not known; write every size"),
        ("data=-1", "write every size"),
        ("tensor=5", "tensor=5 must divide --heads"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(mesh: str, says: str):
    with pytest.raises(UserError, match=says):
        explain(run_config(GPT, mesh=mesh))


def test_a_picture_that_cannot_be_is_refused_before_anything_is_traced(tmp_path, capsys):
    (tmp_path / "there.png").touch()
    for name, says in [("a.jpg", "must end in .png"), ("there.png", "is there already"), ("no/a.png", "in a folder")]:
        assert main(["explain", "--mesh", "pipe=2", "--picture", str(tmp_path / name)]) == 2
        assert f"--picture {tmp_path / name}: " in (err := capsys.readouterr().err) and says in err
    assert [path.name for path in tmp_path.iterdir()] == ["there.png"]


def test_where_nothing_compiles_for_gpus_the_packages_are_named(monkeypatch, capsys):
    """The attention kernel is not put in another's place."""
    lacking = ["jax-cuda12-pjrt==0.0", "nvidia-cudnn-cu12"]
    monkeypatch.setattr(absent, "missing", lambda: lacking)
    assert main(["explain", "--mesh", "tensor=2", "--compiled", "h100"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"pip install --no-deps {' '.join(lacking)}" in err


def test_the_flag_names_the_gpus_that_are_known():
    (named,) = [hint for hint in get_args(get_type_hints(flags.ExplainFlags)["compiled"]) if hint is not type(None)]
    assert get_args(named) == ("cpu", *absent.GPUS)


@pytest.mark.parametrize("name", absent.GPUS)
def test_a_description_of_a_gpu_leaves_nothing_out(name: str):
    """XLA ends the process where a number is missing."""
    text = absent.target(absent.GPUS[name])
    fields = dict(part.split(": ", 1) for part in text.replace("  ", "\n").split("\n") if ": " in part)
    assert all(value.strip() for value in fields.values())
    assert {"core_count", "clock_rate_ghz", "device_memory_size", "memory_bandwidth", "l2_cache_size"} <= {
        key.strip() for key in fields
    }
    assert text.count("{") == text.count("}")


def test_packages_that_are_missing_are_those_not_installed(monkeypatch):
    monkeypatch.setattr(absent, "_installed", lambda package: False)
    monkeypatch.setattr(absent.shutil, "which", lambda name: None)
    assert [each.partition("==")[0] for each in absent.missing()] == [
        "jax-cuda12-plugin",
        "jax-cuda12-pjrt",
        "nvidia-cuda-nvcc-cu12",
        "nvidia-cudnn-cu12",
    ]
    monkeypatch.setattr(absent, "_installed", lambda package: "13" in package)
    assert absent.missing() == ["nvidia-cuda-nvcc"]


# Names


def test_dimensions_are_named_where_their_sizes_tell_them_apart():
    config = dataclasses.replace(preset("gpt2-124m"), global_batch=8, micro_batch=4)
    sizes = {"pipe": 1, "data": 2, "fsdp": 1, "context": 1, "tensor": 4}

    def names(*shape: int, split: bool = False) -> tuple[str, ...]:
        return dimension_names(shape, config, sizes, split)

    assert names(4, 1024, 768) == ("batch", "seq", "embed")
    assert names(4, 1024, 12, 3, 64) == ("batch", "seq", "", "group", "head")  # as many heads as layers
    assert names(4, 256, 768) == ("batch", "", "embed")
    assert names(4, 256, 768, split=True) == ("batch", "seq", "")  # 768 is a fourth of the feed-forward width as well
    assert names(7) == ("",)


def test_a_row_changed_by_hand_is_told_with_its_cost():
    found = small("data=2,tensor=2", layout="mlp=none")
    costs = {row[0]: row[1:] for row in found.changed}
    before, _, after, by = costs["parameters and optimizer state"]
    assert by.startswith("+") and before != after
    assert any(title == "what --layout mlp=none costs a device" for title, _ in tables(found))
    assert not small("data=2,tensor=2").changed


def test_a_pipeline_is_told_with_its_schedule():
    found = small("pipe=2,data=2", micro_batch=4, schedule="zero-bubble")
    told = dict(tables(found))
    assert told["pipeline"][0] == ("layers of each part", "1, 1")
    assert told["schedule"][0][0].startswith("stage 0 F0 ")
    sent = [line for line in found.lines if line.kind == "collective-permute"]
    ticks = found.pipeline.facts.ticks
    assert [(line.axes, line.times) for line in sent] == [(("pipe",), ticks)] * 2
    meetings = [line for line in found.lines if line.axes == ("pipe",) and line.kind == "all-reduce" and line.times > 1]
    assert {line.times for line in meetings} == {4}  # once a microbatch, not once a tick


def test_with_the_state_in_the_hosts_memory_the_same_is_sent_and_it_is_said():
    """On stand-ins, which no process has."""
    plain, offloaded = (small("data=2,tensor=2", zero=1, offload=each) for each in ("none", "optimizer"))
    assert totals(offloaded.lines) == totals(plain.lines)
    assert offloaded.stored == plain.stored
    assert [note for note in offloaded.notes if note not in plain.notes] == [
        "--offload optimizer: masters and moments lie in the host's memory, not the device's"
    ]


def test_a_layout_without_which_the_mesh_could_not_be_is_told_alone():
    found = small("tensor=5", layout="heads=none,mlp=none,vocab=none")
    assert [row[2:] for row in found.changed] == [("without it the mesh does not divide the model",)] * 3
    assert found.changed[0][1] == explaining.size(sum(each.nbytes + each.optimizer for each in found.stored))
