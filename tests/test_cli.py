"""The command line: what it passes on, and one line for everything that is wrong with it."""

import dataclasses
import errno
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import jaxgpt.training
from jaxgpt import flags, presets
from jaxgpt.cli import main
from jaxgpt.config import RunConfig
from jaxgpt.config_file import to_json
from jaxgpt.errors import UserError

TRAIN = """preset run plan data tokenizer init_from validation documents mesh steps seed global_batch micro_batch seq
layers width heads kv_heads vocab dropout attention_dropout lr min_lr warmup lr_schedule decay weight_decay beta1 beta2
epsilon clip layout sequence_parallel context_attention schedule schedule_file virtual_stages stages zero recompute
offload dtype log_every eval_every eval_tokens save_every keep keep_every resume non_finite spike watchdog
 profile prompt"""


@pytest.fixture
def runs(monkeypatch):
    """Stands in for what does the work: records how it is called."""
    calls = []

    def recorded(name, answer):
        def call(*args, **named):
            calls.append((name, args, named))
            return answer

        return call

    result = types.SimpleNamespace(status=0)
    opened = types.SimpleNamespace(
        config=presets.DEMO, stream=recorded("stream", ["(x", "):"]), export=recorded("export", None)
    )
    fake = types.SimpleNamespace(calls=calls, result=result)
    fake.train, fake.evaluate = recorded("train", result), recorded("evaluate", None)
    monkeypatch.setattr(jaxgpt.training, "run", fake, raising=False)
    monkeypatch.setitem(vars(jaxgpt), "load", recorded("load", opened))
    return fake


def trained(runs, *args: str) -> tuple[RunConfig, Path | None, frozenset[str]]:
    assert main(["train", *args]) == 0
    name, (config, run, explicit, _), named = runs.calls.pop()
    assert (name, named, runs.calls) == ("train", {}, [])
    return config, run, explicit


def refused(capsys, *args: str) -> str:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxgpt: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err.removeprefix("jaxgpt: error: ").strip()


# What is passed on


def test_the_flags_are_these_and_no_others():
    assert [field.name for field in dataclasses.fields(flags.TrainFlags)] == TRAIN.split()
    assert [field.name for field in dataclasses.fields(flags.ExplainFlags)] == (
        [*TRAIN.split(), "compiled", "json", "picture"]
    )
    launched = [*TRAIN.split(), "coordinator", "processes", "process"]
    assert [field.name for field in dataclasses.fields(flags.LaunchFlags)] == launched
    planned = ["devices", "hardware", "calibrate", "tokens", "top", "json", "picture", "save", "verify"]
    assert [field.name for field in dataclasses.fields(flags.PlanFlags)] == [*TRAIN.split(), *planned]
    assert [field.name for field in dataclasses.fields(flags.EvalFlags)] == ["run", "data", "mesh", "step", "stride"]
    assert [field.name for field in dataclasses.fields(flags.SampleFlags)] == (
        "run prompt tokens temperature top_k top_p repetition_penalty stop seed mesh step".split()
    )
    assert [field.name for field in dataclasses.fields(flags.ExportFlags)] == ["run", "out", "dtype", "mesh", "step"]


def test_without_flags_the_demo_is_trained(runs):
    assert trained(runs) == (presets.DEMO, None, frozenset())


def test_flags_stand_on_top_of_a_preset(runs):
    config, run, explicit = trained(
        runs, "--preset", "gpt2-124m", "--data", "my_texts/", "--mesh=fsdp=4,tensor=2", "--run", "r", "--min_lr", "1e-5"
    )
    base = presets.PRESETS["gpt2-124m"]
    assert config == dataclasses.replace(base, data="my_texts/", mesh="fsdp=4,tensor=2", min_lr=1e-5)
    assert run == Path("r")
    assert explicit == {"data", "mesh", "min_lr"}


def test_the_rate_at_the_end_follows_the_rate():
    base = presets.preset("demo")
    assert flags.override(base, {"lr": base.lr / 100}).min_lr == pytest.approx(base.min_lr / 100)
    assert flags.override(base, {"lr": base.lr / 100, "min_lr": 1e-6}).min_lr == 1e-6
    assert flags.override(base, {"lr": base.lr}).min_lr == base.min_lr


def test_a_flag_that_repeats_the_default_is_explicit_all_the_same(runs):
    config, _, explicit = trained(runs, "--steps", str(presets.DEMO.steps), "--micro-batch", "None")
    assert config == presets.DEMO
    assert explicit == {"steps", "micro_batch"}


def test_an_existing_run_is_the_base(runs, tmp_path):
    stored = dataclasses.replace(presets.PRESETS["gpt3-125m"], steps=77)
    (tmp_path / "config.json").write_text(to_json(stored))
    assert trained(runs, "--run", str(tmp_path)) == (stored, tmp_path, frozenset())
    config, _, explicit = trained(runs, f"--run={tmp_path}", "--mesh", "tensor=2")
    assert config == dataclasses.replace(stored, mesh="tensor=2")
    assert explicit == {"mesh"}


def test_a_preset_goes_before_the_run_and_a_new_run_has_the_demo(runs, tmp_path):
    assert trained(runs, "--run", str(tmp_path / "new"))[0] == presets.DEMO
    (tmp_path / "config.json").write_text(to_json(presets.PRESETS["gpt3-125m"]))
    assert trained(runs, "--run", str(tmp_path), "--preset", "demo")[0] == presets.DEMO


def test_the_vocabulary_is_explicit_only_where_it_was_given(runs):
    assert "vocab" not in trained(runs, "--tokenizer", "chars")[2]
    assert "vocab" in trained(runs, "--tokenizer", "bpe", "--vocab", "512")[2]


def test_what_width_and_heads_imply_follows_them(runs):
    smol = ("--preset", "smollm2-135m")
    model = trained(runs, *smol, "--heads", "6")[0].model
    assert (model.heads, model.kv, model.head) == (6, 2, 96)
    model = trained(runs, *smol, "--width", "288", "--heads", "9", "--kv-heads", "1")[0].model
    assert (model.kv, model.head, model.mlp) == (1, 32, 768)
    model = trained(runs, "--preset", "gpt3-13b", "--width", "5120")[0].model  # its heads of 128 are stated
    assert (model.head, model.mlp) == (128, 20480)
    assert trained(runs, "--preset", "gpt3-13b", "--layers", "2")[0].model.head == 128


def test_override_takes_any_field_of_model_or_run():
    changed = flags.override(presets.DEMO, {"activation": "gelu", "head_width": 8, "heads": 12, "steps": 4})
    assert (changed.model.activation, changed.model.head, changed.model.kv, changed.steps) == ("gelu", 8, 4, 4)
    assert flags.override(presets.DEMO, {}) == presets.DEMO
    with pytest.raises(UserError, match="step: no such field of a run; did you mean steps"):
        flags.override(presets.DEMO, {"step": 4})


def test_a_new_run_is_named_after_its_preset(runs, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(to_json(presets.DEMO))
    for preset, name in (("gpt2-1.5b", "gpt2-1.5b"), (str(path), "mine")):
        main(["train", "--preset", preset])
        assert runs.calls.pop()[1][3] == name


def test_a_run_that_a_signal_ended_says_so_in_its_status(runs):
    runs.result.status = 75
    assert main(["train"]) == 75


def test_eval(runs):
    assert main(["eval", "runs/mine", "--data", "other.txt"]) == 0
    assert main(["eval", "runs/mine", "--stride", "8"]) == 0
    calls = [(Path("runs/mine"), "other.txt", "", "last", None), (Path("runs/mine"), None, "", "last", 8)]
    assert runs.calls == [("evaluate", call, {}) for call in calls]


def test_sample(runs, capsys):
    assert main(["sample", "runs/mine", "--prompt", "def main", "--seed", "3", "--mesh", "tensor=2"]) == 0
    how = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "stop": [], "seed": 3}
    assert runs.calls == [
        ("load", (Path("runs/mine"), "tensor=2", "last"), {}),
        ("stream", ("def main", 200), how),
    ]
    assert capsys.readouterr().out == "def main(x):\n"
    main(["sample", "runs/mine", "--stop", "\n", "--top-k=5", "--top-p", "0.9", "--repetition-penalty", "1.1"])
    given = {"top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1, "stop": ["\n"], "seed": 0}
    assert runs.calls[-1] == ("stream", (presets.DEMO.prompt, 200), how | given)
    main(["sample", "runs/mine"])
    assert runs.calls[-1][1][0] == presets.DEMO.prompt


def test_a_checkpoint_is_named_by_its_step(runs):
    assert main(["eval", "runs/mine", "--step", "best"]) == 0
    assert runs.calls == [("evaluate", (Path("runs/mine"), None, "", "best", None), {})]


def test_export(runs, tmp_path):
    assert main(["export", "runs/mine", str(tmp_path), "--dtype", "bf16"]) == 0
    assert runs.calls == [("load", (Path("runs/mine"), "", "last"), {}), ("export", (tmp_path, "bf16"), {})]


# Help


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_help_names_the_verbs(capsys, args):
    assert main(args) == 0
    out = capsys.readouterr().out
    verbs = ("train", "eval", "sample", "export", "check", "explain", "plan", "data", "checkpoint")
    assert all(f"\n  {verb} " in out for verb in verbs)


def test_help_shows_the_defaults_of_the_preset(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help", "--preset", "smollm2-135m"])
    assert not stop.value.code
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for field in dataclasses.fields(flags.TrainFlags):
        assert re.search(f"--{field.name.replace('_', '-')}[ ,]", out)
    assert "Transformer blocks. (default: 30)" in out
    assert "(default: wsd)" in out


def test_help_and_complaints_do_not_wait_for_jax():
    code = "import sys; from jaxgpt.cli import main; main(['train', '--stepz', '3']); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# One line for everything that is wrong


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["trian"], "trian: no such verb; did you mean train? known are train, eval, sample"),
        (["train", "--stepz", "3"], "--stepz: no such flag of train; did you mean --steps? see jaxgpt train --help"),
        (["train", "--micro-batches=3"], "did you mean --micro-batch?"),
        (["train", "--"], "--: no such flag of train"),
        (["eval", "r", "--schedule", "gpipe"], "--schedule: no such flag of eval; a value that begins with dashes"),
        (["train", "--steps", "abc"], "--steps abc: not allowed; give a whole number"),
        (["train", "--steps=1.5"], "--steps 1.5: not allowed; give a whole number"),
        (["train", "--lr", "fast"], "--lr fast: not allowed; give a number"),
        (["train", "--micro-batch", "x"], "--micro-batch x: not allowed; give a whole number or None"),
        (
            ["train", "--lr-schedule", "cos"],
            "--lr-schedule cos: not allowed; give one of cosine, linear, wsd, constant",
        ),
        (["train", "--schedule", "2f2b"], "--schedule 2f2b: not allowed; give one of 1f1b, gpipe, interleaved, zero-b"),
        (["train", "--virtual-stages", "0"], "--virtual-stages 0: must be at least 1"),
        (["train", "--steps"], "--steps: a value is missing; give a whole number"),
        (["train", "--steps", "--seed", "3"], "--steps: a value is missing; give a whole number"),
        (["train", "--preset"], "--preset: a value is missing; give a text"),
        (["train", "--run"], "--run: a value is missing; give a path or None"),
        (["train", "--seed", "3", "extra"], "train: Unrecognized options: extra; see jaxgpt train --help"),
        (["train", "-x"], "-x"),
        (["train", "--preset", "gpt2"], "--preset gpt2: no such preset; did you mean gpt2-124m or gpt2-355m"),
        (["train", "--preset", "none.json"], "none.json: no configuration can be read there"),
        (["train", "--steps", "0"], "--steps 0: must be at least 1"),
        (["train", "--heads", "5", "--kv-heads", "5"], "--heads 5: must divide --width 192"),
        (["train", "--heads", "4"], "--heads 4: must be a multiple of 3"),
        (["train", "--heads", "4"], "or give --kv-heads too, such as 2"),
        (["train", "--kv-heads", "4"], "--kv-heads 4: must divide --heads 6"),
        (["train", "--attention-dropout", "0.1"], "--attention-dropout 0.1: only 0 is allowed"),
        (["train", "--profile", "13:10"], "--profile 13:10"),
        (
            ["explain", "--compiled", "h10"],
            "--compiled h10: not allowed; give one of cpu, a100, h100, h200, b200 or None",
        ),
        (["explain", "--steps", "0"], "--steps 0: must be at least 1"),
        (["explain", "--jsn"], "--jsn: no such flag of explain; did you mean --json?"),
        (
            ["eval"],
            "eval: RUN is missing (Folder of the run, a Hugging Face folder, or a GGUF file); see jaxgpt eval --help",
        ),
        (["eval", "a", "b"], "b"),
        (["sample", "a", "--tokens", "0"], "--tokens 0: must be at least 1"),
        (["sample", "a", "--temprature", "1"], "did you mean --temperature?"),
        (["export"], "GGUF file), OUT is missing (New or empty folder); see"),
        (["export", "a"], "export: OUT is missing (New or empty folder); see"),
        (["data", "prepare", "--data", "a"], "data prepare: --out is missing (Folder to make); see"),
        (["export", "a", "b", "--dtype", "fp8"], "--dtype fp8: not allowed; give one of fp32, bf16"),
        (["sample", "a", "--tokens", "many"], "--tokens many: not allowed; give a whole number"),
    ],
)
def test_one_line(runs, capsys, args, says):
    assert says in refused(capsys, *args)
    assert runs.calls == []


def test_a_damaged_configuration_of_an_existing_run_is_named(runs, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert f"{tmp_path}/config.json: not a configuration" in refused(capsys, "train", "--run", str(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_refuses_is_one_line(runs, capsys, number):
    def train(*_):
        raise OSError(number, "the reason", "runs/mine/file")

    runs.train = train
    assert refused(capsys, "train") == "runs/mine/file: the reason"


def test_ctrl_c_is_one_line(runs, capsys):
    def train(*_):
        raise KeyboardInterrupt

    runs.train = train
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "jaxgpt: error: interrupted\n"


@pytest.mark.parametrize("bug", [ValueError("a bug"), OSError(errno.EBADF, "a bug"), KeyError("a bug")])
def test_bugs_keep_their_traceback(runs, bug):
    def train(*_):
        raise bug

    runs.train = train
    with pytest.raises(type(bug), match="a bug"):
        main(["train"])


def test_a_switch_can_be_turned_off_and_a_value_begin_with_dashes(runs):
    config, _, explicit = trained(runs, "--no-sequence-parallel", "--prompt=-- x")
    assert config.sequence_parallel is False
    assert config.prompt == "-- x"
    assert {"sequence_parallel", "prompt"} <= explicit
