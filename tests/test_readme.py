"""The README's commands, run as they stand, with flags behind them that make them small."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import definition
import jax
import jax.numpy as jnp
import pytest

import jaxgpt
from jaxgpt.cli import main

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
TINY = (
    "--tokenizer bytes --vocab 256 --layers 1 --width 32 --heads 4 --kv-heads 4 --seq 16 --steps 2 --warmup 0 "
    "--global-batch 16 --micro-batch 2 --validation 0.01 --eval-tokens 64"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with what the commands name."""
    path = tmp_path_factory.mktemp("readme")
    (path / "my_texts").mkdir()
    text = "def main():\n    print('hello')\n\n" * 100
    (path / "my_texts" / "code.py").write_text(text)
    (path / "other.txt").write_text(text[:500])
    return path


@pytest.fixture
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("JAXGPT_CACHE", str(folder / "cache"))


def parts(command: str) -> list[list[str]]:
    return [shlex.split(part) for part in command.split(" && ")]


def test_the_commands_are_known():
    """Each has its test below."""
    verbs = [parts(command)[-1][:2] for command in COMMANDS]
    assert verbs == [
        [".venv/bin/jaxgpt", "train"],
        [".venv/bin/pytest"],
        *(["jaxgpt", verb] for verb in "train train eval sample export explain explain plan check".split()),
        *(["jaxgpt", "data"] for _ in range(3)),
        ["jaxgpt", "checkpoint"],
    ]


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_both_commands_install_this_project_with_what_the_tests_need(command):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert parts(command)[:2] == [
        ["python3", "-m", "venv", ".venv"],
        [".venv/bin/pip", "install", "-e", ".[test]"],
    ]
    assert "test" in project["optional-dependencies"]
    assert project["scripts"] == {"jaxgpt": "jaxgpt.cli:main"}


def test_the_first_command_trains_in_a_process_of_its_own(folder, there):
    command = [sys.executable, "-m", "jaxgpt", *parts(COMMANDS[0])[-1][1:], *TINY, "--data", "my_texts"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "8 virtual CPU devices" in done.stdout + done.stderr
    assert {"config.json", "checkpoints", "metrics.jsonl", "loss.png"} <= set(os.listdir(folder / "runs" / "demo-1"))


def test_the_other_commands_in_turn(folder, there, capsys):
    found = [parts(command)[0][1:] for command in COMMANDS[2:]]
    train, resume, evaluate, sample, export, explain, draw, plan, check, prepare, inspect, blend, verify = found
    assert main([*train, *TINY]) == 0
    assert (folder / "runs" / "mine" / "loss.png").stat().st_size > 0
    capsys.readouterr()
    assert main(resume) == 0
    assert "step 2" in capsys.readouterr().out
    assert main(evaluate) == 0
    assert "perplexity" in capsys.readouterr().out
    assert main([*sample, "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("def main(")
    assert main(export) == 0
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= set(os.listdir("out"))
    assert "model.safetensors" in capsys.readouterr().out
    assert main(["export", "a run that is not there", "out"]) == 2  # before a model is opened
    assert "out: is there already" in capsys.readouterr().err
    assert main(verify) == 0
    assert "step-00000002: whole" in capsys.readouterr().out
    notebook()
    assert main(check + TINY + ["--data", "my_texts"]) == 0
    assert "parameter blocks.mlp.up.weight" in capsys.readouterr().out
    assert main([*prepare, "--validation", "0.3"]) == 0
    capsys.readouterr()
    assert main(inspect) == 0
    assert "bytes a token" in capsys.readouterr().out
    assert main([*blend, "--validation", "0.3"]) == 0
    assert "checksum of the order" in capsys.readouterr().out
    assert "4096 devices" in told(explain)
    assert "zero-bubble: idle for" in told(draw)
    assert (folder / "schedule.png").stat().st_size > 0
    assert "1024 x a100-80gb" in told(plan)


def told(command: list[str]) -> str:
    """What explain or plan prints, as it stands: it needs no device, but JAX not yet started."""
    in_process = [sys.executable, "-m", "jaxgpt", *command]
    done = subprocess.run(in_process, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def notebook() -> None:
    """The README's lines of Python, on the run that its commands made."""
    block, another = (block for kind, block in BLOCKS if kind == "python")
    tokens = jnp.zeros((2, 16), jnp.int32)
    names: dict[str, Any] = {"tokens": tokens}
    exec(block, names)
    assert names["run"].model(tokens).shape == (2, 16, 256)
    assert names["gradients"].keys() == names["run"].params.keys()
    assert names["activations"]["blocks.0.attention"].shape == (2, 16, 32)
    assert len(names["run"].losses) == 2
    assert names["changed"](tokens).shape == (2, 16, 256)
    assert "tensor: S(vocab)" in repr(names["run"].layouts())
    any_function(another)


def any_function(block: str) -> None:
    """The README's lines about a function of the user's own."""

    def step(weights: jax.Array, batch: jax.Array) -> Any:
        return jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(weights)

    weights, batch = jnp.ones((16, 32)) / 16, jnp.arange(128.0).reshape(8, 16) / 128
    names: dict[str, Any] = {"step": step, "weights": weights, "batch": batch, "mesh": definition.mesh({"data": 2})}
    exec(block, {"jaxgpt": jaxgpt} | names, names)
    for found, wanted in zip((names["loss"], names["gradients"]), step(weights, batch), strict=True):
        assert jnp.allclose(found, wanted, rtol=1e-5, atol=1e-7)


def test_experiments_say_what_they_measure():
    """Those that the README names, beside their results; what they measure takes minutes, so they are asked alone."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"\| `(\w+)\.py` \|", text)
    assert len(named) >= 5
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    asked = [
        subprocess.Popen(
            [sys.executable, f"experiments/{name}.py", "--help"], cwd=ROOT, env=env, stdout=subprocess.PIPE
        )
        for name in named
    ]
    for name, process in zip(named, asked, strict=True):
        assert f"experiments/{name}.py".encode() in process.communicate()[0]
        assert process.returncode == 0
        assert (ROOT / "experiments" / "results" / f"{name}.json").is_file()
