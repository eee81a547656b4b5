"""jaxgpt plan: what it prints, keeps and refuses; and a saved plan given to train."""

import dataclasses
import json
import re
import types

import pytest
from quickly import unoptimized
from tiny import GPT, run_config

import jaxgpt.training
from jaxgpt import presets
from jaxgpt.cli import main
from jaxgpt.config import RunConfig
from jaxgpt.config_file import to_json
from jaxgpt.planner import absent
from jaxgpt.planner.hardware import find, table
from jaxgpt.sharding import mesh

SMALL = "--preset gpt2-355m --devices 4 --hardware h100 --global-batch 16".split()
NUMBERS = (
    "step_seconds tokens_per_second model_tflops_per_device hardware_tflops_per_device mfu hfu peak_bytes "
    "capacity_bytes micro_batch virtual_stages zero days"
).split()


def told(capsys, *args: str) -> dict:
    status = main(["plan", *args, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert status == (0 if document["plans"][0]["fits"] else 1)
    return document


def refused(capsys, *args: str) -> str:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxgpt: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("jaxgpt: error: ").strip()


# What it prints


def test_json_has_every_number_best_first(capsys):
    document = told(capsys, *SMALL, "--top", "4", "--tokens", "1e9")
    plans = document["plans"]
    assert len(plans) == 4
    seconds = [each["step_seconds"] for each in plans]
    assert seconds == sorted(seconds)
    assert len({each["mesh"] for each in plans}) == 4
    for each in plans:
        assert all(type(each[name]) in (int, float) for name in NUMBERS)
        assert sum(each["time"].values()) == pytest.approx(each["step_seconds"])
        assert sum(each["memory"].values()) == each["peak_bytes"]
        assert each["tokens_per_second"] == pytest.approx(16 * 1024 / each["step_seconds"])
        assert each["days"] == pytest.approx(1e9 / each["tokens_per_second"] / 86400)
        assert 0 < each["mfu"] <= each["hfu"] < 1
        assert each["fits"] is True
    assert plans[0]["why"] == ""
    assert all(each["why"] for each in plans[1:])
    assert document["parameters"] == 354_823_168
    assert document["searched"]["plans"] > document["searched"]["meshes"] > 0


def test_tables_and_picture(capsys, tmp_path):
    picture = tmp_path / "plans.png"
    assert main(["plan", *SMALL, "--top", "2", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    for text in ("354,823,168 parameters", "4 x h100", "MFU", "activations", "optimizer", "why the others"):
        assert text in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "is there already" in refused(capsys, "plan", *SMALL, "--picture", str(picture))


def test_what_a_plan_is_behind_by_adds_up(capsys):
    for each in told(capsys, *SMALL, "--top", "20")["plans"][1:]:
        if "as fast" not in each["why"]:
            behind, *_ = each["why"].split(":")
            parts = re.findall(r"([+-])([\d.e+-]+) (ms|s)(?:,|$)", each["why"])
            total = sum(float(sign + number) * (1e-3 if unit == "ms" else 1) for sign, number, unit in parts)
            first = each["step_seconds"] / (1 + float(behind.strip("+%")) / 100)
            assert total == pytest.approx(each["step_seconds"] - first, rel=0.12, abs=1e-3 * first)


def test_long_times_and_one_microbatch_are_told_in_full(capsys):
    shape = ["--preset", "gpt3-13b", "--mesh", "tensor=4", "--hardware", "h100", "--top", "1"]
    assert main(["plan", *shape]) == 0
    out = capsys.readouterr().out
    assert "e+" not in out.split("time of a step, ms")[1]
    assert "1 microbatch of 1024" in out


def test_help_names_every_kind_of_device(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    told_names = capsys.readouterr().out.replace(",", " ").replace("(", " ").replace(")", " ").split()
    assert set(table()) <= set(told_names)


def test_what_is_given_is_kept(capsys):
    pinned = "--micro-batch 2 --zero 1 --recompute selective --no-sequence-parallel".split()
    for each in told(capsys, *SMALL, *pinned)["plans"]:
        kept = each["micro_batch"], each["zero"], each["recompute"], each["sequence_parallel"]
        assert kept == (2, 1, "selective", False)
    document = told(capsys, *SMALL[:2], *SMALL[4:], "--mesh", "pipe=2,data=2", "--schedule", "zero-bubble")
    assert document["devices"] == 4
    assert {(each["mesh"], each["schedule"]) for each in document["plans"]} == {("pipe=2,data=2", "zero-bubble")}


def test_layers_that_compute_again_can_be_counted(capsys):
    (plan, *_) = told(capsys, *SMALL, "--recompute", "full:12")["plans"]
    assert plan["recompute"] == "full:12"
    all_of_them, none = (told(capsys, *SMALL, "--recompute", each)["plans"][0] for each in ("full", "none"))
    assert none["step_seconds"] < plan["step_seconds"] < all_of_them["step_seconds"]
    for bad in ("full:0", "full:25", "selective:x", "none:3", "half", "full:"):
        assert refused(capsys, "plan", *SMALL, "--recompute", bad).startswith(f"--recompute {bad}: must ")


def test_a_presets_own_choices_are_not_kept(capsys):
    """They are what train does without a plan; here they are what is asked for."""
    base = presets.preset("gpt3-1.3b")
    assert base.micro_batch == 4
    plans = told(capsys, "--preset", "gpt3-1.3b", "--mesh", "data=8", "--hardware", "h100", "--top", "20")["plans"]
    assert {each["micro_batch"] for each in plans} != {4}


def test_a_shape_alone_is_a_gpts(capsys):
    shape = "--layers 40 --width 6144 --heads 48 --vocab 51200 --seq 2048 --global-batch 1024"
    document = told(capsys, *shape.split(), "--mesh", "pipe=2,data=16,tensor=8", "--hardware", "a100-80gb")
    model = presets.preset("megatron-7.5b").model
    assert document["model"] == dataclasses.asdict(
        dataclasses.replace(model, layers=40, width=6144, heads=48, head_width=None)
    )


def test_a_pinned_mesh_that_does_not_fit_is_told_and_exits_with_1(capsys, tmp_path):
    large = "--preset gpt3-13b --mesh data=8 --hardware h100".split()
    document = told(capsys, *large)
    assert document["plans"][0]["fits"] is False
    assert main(["plan", *large]) == 1
    assert "no plan fits 8: memory, " in capsys.readouterr().out
    file = tmp_path / "plan.json"
    assert "does not fit" in refused_after(capsys, "plan", *large, "--save", str(file))
    assert not file.exists()


def refused_after(capsys, *args: str) -> str:
    """As refused, of what is found out only after the tables."""
    assert main(args) == 2
    return capsys.readouterr().err


# Saved, and given to train


@pytest.fixture
def trained(monkeypatch):
    """train(*args) -> configuration and explicit fields that training is called with."""
    calls = []
    fake = types.SimpleNamespace(train=lambda *args: calls.append(args) or types.SimpleNamespace(status=0))
    monkeypatch.setattr(jaxgpt.training, "run", fake, raising=False)

    def train(*args: str) -> tuple[RunConfig, frozenset[str]]:
        assert main(["train", *args]) == 0
        config, _, explicit, _ = calls.pop()
        return config, explicit

    return train


@pytest.fixture
def file(capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert main(["plan", *SMALL, "--tokens", "1e9", "--save", str(path)]) == 0
    capsys.readouterr()
    return path


def test_a_saved_plan_is_what_train_then_does(capsys, file, trained):
    (first, *_) = told(capsys, *SMALL)["plans"]
    config, explicit = trained("--plan", str(file), "--data", "mine.txt")
    assert config.model == presets.preset("gpt2-355m").model
    assert (config.mesh, config.micro_batch, config.schedule) == (
        first["mesh"],
        first["micro_batch"],
        first["schedule"],
    )
    assert (config.zero, config.recompute, config.global_batch) == (first["zero"], first["recompute"], 16)
    assert (config.data, config.sequence_parallel) == ("mine.txt", first["sequence_parallel"])
    assert {"mesh", "micro_batch", "zero", "recompute", "data"} <= explicit
    mesh.check(config, mesh.parse(config.mesh))


def test_a_flag_goes_before_the_plan_and_the_plan_before_the_preset(file, trained):
    config, _ = trained("--plan", str(file), "--preset", "gpt2-355m", "--recompute", "full", "--lr", "0.5")
    assert (config.recompute, config.lr, config.global_batch) == ("full", 0.5, 16)
    assert config.steps == presets.preset("gpt2-355m").steps


def test_a_plan_onto_a_run_that_is_there(file, trained, tmp_path):
    base = dataclasses.replace(presets.preset("gpt2-355m"), mesh="data=8", global_batch=16)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(to_json(base))
    config, explicit = trained("--run", str(run), "--plan", str(file))
    planned = json.loads(file.read_text())
    assert (config.mesh, config.micro_batch) == (planned["mesh"], planned["micro_batch"])
    assert {"mesh", "micro_batch", "stages"} <= explicit
    assert "lr" not in explicit


def test_a_saved_plan_is_never_overwritten(capsys, file):
    before = file.read_text()
    assert "is there already" in refused(capsys, "plan", *SMALL, "--save", str(file))
    assert file.read_text() == before


def test_a_plan_of_another_model_is_refused(capsys, file):
    message = refused(capsys, "train", "--plan", str(file), "--preset", "gpt2-124m")
    assert message.startswith(f"--plan {file}: is of another model than --preset gpt2-124m (layers: 24, 12; ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[: len(text) // 2], "not a plan of jaxgpt"),
        (lambda text: "[]", "not a plan of jaxgpt (without config)"),
        (lambda text: text.replace('"zero"', '"zeros"', 1), "without zero"),
        (lambda text: text.replace('"mesh": "', '"mesh": "tensr=2,', 1), "'tensr' is not an axis"),
        (lambda text: text.replace('"schedule": "1f1b"', '"schedule": "2f2b"', 1), 'schedule "2f2b": must be one of'),
        (lambda text: text.replace('"layers": 24', '"layers": "24"'), 'layers "24": must be a whole number'),
    ],
)
def test_a_broken_plan_file_is_named_in_one_line(capsys, file, change, says):
    file.write_text(change(file.read_text()))
    message = refused(capsys, "train", "--plan", str(file))
    assert str(file) in message
    assert says in message


# Refused


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--devices 8 --hardware h10", "--hardware h10: not known; did you mean h100"),
        ("--devices 8 --hardware none.toml", "--hardware none.toml: cannot be read"),
        ("--devices 0 --hardware h100", "--devices 0: must be at least 1"),
        ("--hardware h100", "how many is not said; give --devices, or --mesh"),
        ("--devices 8 --hardware h100 --mesh tensor=4", "the product 4 is not the number of devices, 8"),
        ("--devices 8 --hardware h100 --mesh tensr=4", "did you mean tensor?"),
        ("--devices 8 --hardware h100 --top 0", "--top 0: must be at least 1"),
        ("--devices 8 --hardware h100 --tokens -3", "--tokens -3.0: must be above 0"),
        ("--devices 8 --hardware h100 --calibrate", "--calibrate with --hardware h100"),
        ("--devices 7 --hardware h100", "--devices 7: no plan is legal"),
        ("--devices 2 --hardware h100 --micro-batch 7", "without --micro-batch 7"),
        ("--devices 8 --hardware h100 --schedule 2f2b", "--schedule 2f2b: not allowed; give one of"),
        ("--mesh pipe=2 --virtual-stages 2 --schedule gpipe --hardware h100", "--virtual-stages 2: only --schedule"),
        ("--devices 1 --hardware v100-16gb --preset gpt3-13b", "no plan fits 1: memory, "),
        ("--devices 8 --hardware v100-16gb --verify", "--verify: nothing is known that compiles for v100-16gb"),
        ("--preset none --devices 8", "--preset none: no such preset"),
    ],
)
def test_one_line(capsys, flags, says):
    assert says in refused(capsys, "plan", *flags.split())


def test_a_broken_hardware_file(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("tflops = 3")
    assert f"--hardware {path}: " in refused(capsys, "plan", "--devices", "8", "--hardware", str(path))
    path.write_text("tflops = [")
    assert f"--hardware {path}: not TOML" in refused(capsys, "plan", "--devices", "8", "--hardware", str(path))


def test_ones_own_hardware(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(find("h100").to_json() | {"memory": 2**40}))
    (plan,) = told(capsys, *SMALL[:4], "--hardware", str(path), "--top", "1")["plans"]
    assert plan["capacity_bytes"] == 2**40


def test_verify_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(absent, "missing", lambda: ["nvidia-cudnn-cu12"])
    message = refused(capsys, "plan", *SMALL, "--verify")
    assert message.endswith("is not installed; pip install --no-deps nvidia-cudnn-cu12")


@pytest.mark.parametrize("memory", [2**33, 2**16])
def test_verify_puts_the_compilers_word_in_place_of_the_prediction(capsys, tmp_path, memory):
    preset, hardware = tmp_path / "tiny.json", tmp_path / "hardware.json"
    preset.write_text(to_json(run_config(GPT, global_batch=8)))
    hardware.write_text(json.dumps(find("cpu").to_json() | {"memory": memory}))
    flags = ["--preset", str(preset), "--hardware", str(hardware), "--mesh", "data=2,fsdp=2", "--micro-batch", "2"]
    with unoptimized():
        (plan, *_) = told(capsys, *flags, "--recompute", "none", "--zero", "0", "--verify")["plans"]
    found = plan["verified"]
    assert plan["peak_bytes"] == found["peak_bytes"] >= found["argument_bytes"] > 0
    assert plan["fits"] is found["fits"] is (memory == 2**33)
    assert found["predicted_peak_bytes"] == sum(plan["memory"].values())
    assert found["collectives"]
    for each in found["collectives"]:
        assert each["bytes"] == each["predicted_bytes"] > 0
