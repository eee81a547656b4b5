"""`jaxgpt check`: a user's configuration proved on his own data, failed where it is wrong, refused in one line."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from foreign import drawn, exported
from foreign import program as one_device
from quickly import unoptimized
from tiny import GPT

from jaxgpt import host_memory, presets
from jaxgpt.cli import main
from jaxgpt.config_file import to_json
from jaxgpt.data import open_dataset, training_batch
from jaxgpt.flags import override
from jaxgpt.training import check, parity
from jaxgpt.training import step as train_step
from jaxgpt.training.parity import Difference, Trace
from jaxgpt.training.program import Program

TINY = "--tokenizer bytes --layers 1 --width 32 --heads 8 --kv-heads 8 --seq 16 --global-batch 8".split()
BYTES = dataclasses.replace(GPT, vocab=256)
Checked = Callable[..., tuple[int, list[str]]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "good.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return file


@pytest.fixture
def checked(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Checked:
    """check(*flags) on the text, with nothing left behind: exit status, and the lines on standard output or error."""
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, list[str]]:
        status = main(["check", "--data", str(text), *TINY, *args])
        out, err = capsys.readouterr()
        assert {path.name for path in tmp_path.iterdir()} <= {"cache", "run"}
        return status, (err if status == 2 else out).splitlines()

    return run


class Told:
    """In place of training: traces of one value each, told by type of computation and number of devices."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], float] = {}
        self.programs: list[Program] = []
        self.batches: Any = None
        self.starts: list[Any] = []

    def steps(self, program: Program, batches: Any, state: Any = None) -> Trace:
        self.programs.append(program)
        self.starts.append(state)
        self.batches = batches
        value = self.values.get((program.dtype, program.mesh.size), 1.0)
        arrays = {name: np.full(shape, value, np.float32) for name, shape in program.logical.items()}
        return Trace(np.full(len(batches), value), np.full(len(batches), value), arrays, arrays)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    found = Told()
    monkeypatch.setattr(parity, "steps", found.steps)
    monkeypatch.setattr(check, "_needed", check._at_least)
    return found


# Through and through


def test_a_configuration_is_proved(checked: Checked) -> None:
    flags = "--mesh data=2,tensor=2 --sequence-parallel --zero 1 --dropout 0.1 --micro-batch 2 --dtype bf16"
    with unoptimized():
        status, lines = checked(*flags.split())
    assert status == 0
    assert "one device: 3 x 2 microbatches of 4 x 16 tokens, fp32" in lines
    assert "one device: 3 x 2 microbatches of 4 x 16 tokens, bf16" in lines
    assert "data=2,tensor=2: 3 x 2 microbatches of 4 x 16 tokens, bf16" in lines
    assert lines[-1].startswith("data=2,tensor=2 computes what one device does: of 24 arrays the worst, ")
    assert not [line for line in lines if "DIFFERS" in line]


def test_a_fault_is_shown_by_name_and_place(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted on the mesh: the last norm's gradient misses one element."""
    real = train_step.Step.reduced

    def reduced(self: Any, name: str, gradient: jax.Array) -> jax.Array:
        whole = real(self, name, gradient)
        return whole.at[7].set(0) if name == "final_norm.scale" and self.sizes["data"] == 2 else whole

    monkeypatch.setattr(train_step.Step, "reduced", reduced)
    with unoptimized():
        status, lines = checked("--mesh", "data=2", "--steps", "1")
    assert status == 1
    (title,) = [number for number, line in enumerate(lines) if line.startswith("largest difference")]
    worst = lines[title + 1]
    assert worst.split()[:3] == ["gradient", "of", "final_norm.scale"]
    assert "DIFFERS" in worst and worst.endswith("norm 7")
    assert "most in gradient of final_norm.scale" in lines[-1]
    assert any("gradient of embedding.token.weight" in line and "DIFFERS" not in line for line in lines)


# What is compared


def test_the_first_steps_of_the_run_are_compared_and_what_differs_is_said(
    checked: Checked, told: Told, text: Path
) -> None:
    status, lines = checked("--mesh", "data=4", "--seed", "5", "--zero", "2", "--micro-batch", "1")
    assert status == 0
    assert "compared: the first 3 of 300 steps; --steps compares more" in lines
    assert "--epsilon 0.001 in place of 1e-08, which makes steps of rounding" in lines
    assert any(line.startswith("--warmup 0 in place of 30") for line in lines)
    one, mesh = (program.config for program in told.programs)
    assert (one.zero, one.micro_batch, mesh.zero, mesh.micro_batch) == (0, 4, 2, 1)
    assert (mesh.steps, mesh.epsilon, mesh.warmup, mesh.lr) == (300, 1e-3, 0, presets.DEMO.lr)
    train = open_dataset(str(text), "bytes", 256, 0.05).train
    for step, batch in enumerate(told.batches):
        tokens = training_batch(train, 16, 5, step * 8, 8)
        np.testing.assert_array_equal(batch["inputs"], tokens[:, :-1])
        np.testing.assert_array_equal(batch["targets"], tokens[:, 1:])


def test_steps_are_those_that_were_asked_for(checked: Checked, told: Told) -> None:
    assert checked("--mesh", "data=2", "--steps", "7", "--epsilon", "0.01", "--warmup", "0")[0] == 0
    assert len(told.batches) == 7
    assert told.programs[-1].config.epsilon == 0.01
    checked("--mesh", "data=2", "--steps", "2")
    assert len(told.batches) == 2


def test_one_device_has_no_pipeline_to_cut(checked: Checked, told: Told) -> None:
    status, lines = checked(*"--mesh pipe=2 --schedule interleaved --virtual-stages 2 --layers 6".split())
    assert status == 0, lines
    assert checked(*"--mesh pipe=2,data=2 --stages 1,3 --layers 4".split())[0] == 0


def test_all_devices_are_on_data_without_a_mesh(checked: Checked, told: Told) -> None:
    assert checked()[1][-1].startswith("data=8 computes what one device does")


def test_one_device_against_itself(checked: Checked, told: Told) -> None:
    status, lines = checked("--mesh", "data=1")
    assert status == 0
    assert lines[0].startswith("one device on both sides: ")
    assert [program.mesh.size for program in told.programs] == [1, 1]


def test_the_configuration_of_a_run_is_proved(checked: Checked, told: Told, tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    tiny = {"layers": 1, "width": 32, "heads": 4, "kv_heads": 4, "seq": 8, "data": str(text), "tokenizer": "bytes"}
    (run / "config.json").write_text(to_json(override(presets.DEMO, {**tiny, "vocab": 256, "lr": 5e-3})))
    before = sorted(run.rglob("*"))
    assert main(["check", "--run", str(run), "--mesh", "tensor=2"]) == 0
    assert told.programs[-1].config.model.seq == 8
    assert told.programs[-1].config.lr == 5e-3
    assert sorted(run.rglob("*")) == before


def test_in_bf16_one_devices_own_rounding_is_the_measure(checked: Checked, told: Told) -> None:
    flags = ("--mesh", "data=2", "--dtype", "bf16")
    told.values = {("fp32", 1): 1.0, ("bf16", 1): 1.01, ("bf16", 2): 0.992}
    assert checked(*flags)[0] == 0
    told.values[("bf16", 2)] = 0.988
    status, lines = checked(*flags)
    assert status == 1
    assert "allowed in bf16: 2 times what one device's bf16 differs by from its fp32, and no less than in fp32" in lines


def test_what_is_not_finite(checked: Checked, told: Told) -> None:
    told.values = {("fp32", 2): np.nan}
    status, lines = checked("--mesh", "data=2")
    assert status == 1
    assert any("not finite" in line and "DIFFERS" in line for line in lines)
    told.values = {("fp32", 1): np.inf}
    status, lines = checked("--mesh", "data=2")
    assert status == 2
    assert lines[-1].endswith("nothing can be compared; take a smaller --lr")


# Memory


def test_a_model_too_large_for_the_machine_is_one_line(checked: Checked, told: Told) -> None:
    status, lines = checked("--preset", "gpt3-175b", "--layers", "96", "--width", "12288", "--mesh", "data=8")
    assert status == 2
    assert lines == [line for line in lines if line.startswith("jaxgpt: error: one device: a comparison of 174,")]
    assert "free; check a smaller model of the same kind" in lines[0]
    assert told.programs == []


def test_a_mesh_whose_copies_do_not_fit_is_one_line(
    checked: Checked, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available", lambda: 2_000_000)
    assert checked("--mesh", "data=8", "--zero", "3")[0] == 0
    status, lines = checked("--mesh", "data=8")
    assert status == 2
    assert lines[0].startswith("jaxgpt: error: --mesh data=8: a comparison of ")


def test_one_device_takes_the_microbatch_that_fits(
    checked: Checked, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence takes a megabyte, beside what the state takes."""
    least = check._at_least
    monkeypatch.setattr(check, "_needed", lambda p: least(p) + p.micro_batch // p.mesh.size * 1_000_000)
    for room, micro in ((50e6, 8), (6e6, 4), (4e6, 2), (2.3e6, 1)):
        monkeypatch.setattr(host_memory, "available", lambda room=room: int(room))
        told.programs.clear()
        status, lines = checked("--mesh", "data=8", "--zero", "3")
        assert status == 0, lines
        assert told.programs[0].micro_batch == micro
    monkeypatch.setattr(host_memory, "available", lambda: 1_700_000)
    status, lines = checked("--mesh", "data=8", "--zero", "3")
    assert status == 2
    assert "one device: a comparison of microbatches of 1 sequences takes" in lines[-1]


# Bad input


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--mesh context=3", "2 x context = 6 must divide --seq 16"),
        ("--mesh context=8 --seq 24", "2 x context = 16 must divide --seq 24; nearest for 8 devices: "),
        ("--mesh tensor=16", "--mesh of 16 devices: JAX has already started with 8"),
        ("--mesh tensor=8 --heads 4 --kv-heads 4", "tensor=8 must divide --heads 4; nearest for 8 devices: "),
        ("--mesh data=8 --zero 1 --width 36 --heads 4 --kv-heads 4", "must divide --width 36"),
        ("--mesh tensor=8 --seq 20 --sequence-parallel", "must divide --seq 20"),
        ("--mesh data=2 --zero 4", "--zero 4: not allowed; give one of 0, 1, 2, 3"),
        ("--mesh tensr=2", "'tensr' is not an axis; did you mean tensor?"),
        ("--mesh tensor=2 --layout heads=tensor+tensor", "cannot lie twice on one axis"),
        ("--mesh tensor=2 --layout hads=tensor", "'hads' is not a dimension"),
        ("--mesh tensor=2 --layout heads=tensr", "'tensr' is not a mesh axis"),
        ("--mesh tensor=2 --layout mlp=data", "mlp cannot lie on data"),
        ("--mesh data=2 --micro-batch 3", "--micro-batch 3: must divide a device's share of --global-batch, 4"),
        ("--mesh data=2 --seq 4096", "fewer than the 4097 of one sample"),
        ("--mesh data=2 --data none.txt", "none.txt"),
        ("--meshes data=2", "--meshes: no such flag of check; did you mean --mesh?"),
    ],
)
def test_one_line(checked: Checked, told: Told, flags: str, says: str) -> None:
    status, lines = checked(*flags.split())
    assert status == 2
    assert says in lines[-1]
    assert lines[-1].startswith("jaxgpt: error: ")
    assert told.programs == []


# The measure itself


def traced(losses: list[float], **arrays: list[float]) -> Trace:
    values = {name: np.array(each, np.float32) for name, each in arrays.items()}
    return Trace(np.array(losses), np.array(losses), values, values)


def test_differences_are_of_the_array_or_of_the_model() -> None:
    one = traced([1.0], large=[100.0, 1.0], small=[1e-9])
    other = traced([1.0], large=[100.0, 1.0009], small=[1e-9 + 1.2e-5])
    by_name = {d.name: d for d in parity.differences(one, other)}
    assert by_name["gradient of large"].allowed == pytest.approx(1e-3)
    assert by_name["gradient of large"].share == pytest.approx(0.9, rel=1e-2)
    assert by_name["gradient of large"].at == (1,)
    assert by_name["parameter small"].allowed == pytest.approx(1e-5)
    assert not by_name["parameter small"].holds
    assert [d.holds for d in parity.differences(one, other)] == [False, False, True, True, True, True]


def test_what_is_not_a_number_never_holds() -> None:
    assert not Difference("x", float("nan"), 1.0).holds
    assert not Difference("x", float("inf"), 1.0).holds
    assert not Difference("x", 1e-30, 0.0).holds
    assert Difference("x", 0.0, 0.0).holds
    one = traced([1.0], a=[1.0], b=[1.0])
    other = dataclasses.replace(traced([1.0], a=[1.0], b=[np.nan]), losses=np.array([1.1]))
    assert [d.name for d in parity.differences(one, other)][:2] == ["gradient of b", "parameter b"]


def test_roundings_are_root_mean_squares() -> None:
    exact, one = traced([1.0], a=[1.0, 1.0, 1.0, 1.0]), traced([1.0], a=[1.01, 0.99, 1.01, 0.99])
    for far, holds in ((0.03, True), (0.05, False)):  # of one element of four: half as much of all
        other = traced([1.0], a=[1.01, 0.99, 1.01, 0.99 + far])
        found = parity.roundings(exact, one, other)
        assert all(d.holds for d in found) is holds
        assert found[0].found == pytest.approx(far / 2, rel=1e-3)
        assert found[0].allowed == pytest.approx(0.02, rel=1e-3)
        assert found[0].at == (3,)


def test_offload_is_proved_like_recomputation(checked: Checked, told: Told) -> None:
    assert checked("--mesh", "data=1", "--offload", "optimizer", "--recompute", "full")[0] == 0
    one, mesh = (program.config for program in told.programs)
    assert (one.offload, one.recompute) == ("none", "none")
    assert (mesh.offload, mesh.recompute) == ("optimizer", "full")


def test_a_model_that_is_trained_on_is_compared_from_where_it_is(
    checked: Checked, told: Told, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = exported(tmp_path_factory.mktemp("model"), BYTES) / "model"
    assert checked("--mesh", "tensor=2", "--init-from", str(model), "--layers", "2")[0] == 0
    of = one_device(BYTES)
    for program, state in zip(told.programs, told.starts, strict=True):
        assert state["step"] == 0
        for name, array in drawn(of).items():
            np.testing.assert_array_equal(np.asarray(state["params"][name]), np.asarray(array), str(program.sizes))


def test_the_vocabulary_that_the_tokenizer_has_must_fit_the_mesh_too(checked: Checked, told: Told) -> None:
    status, lines = checked(*"--mesh tensor=3 --heads 3 --kv-heads 3 --width 72 --vocab 1152".split())
    assert status == 2, lines
    assert "must divide the padded --vocab" in lines[-1]
