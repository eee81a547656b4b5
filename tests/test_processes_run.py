"""Runs of two and four processes on this machine: the numbers of one process, stopped, killed, resumed, moved."""

import dataclasses
import hashlib
import json
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bigram import HERE, last_arrays, losses, text
from many import LIMIT, command, ended, started
from tiny import GPT, batches, run_config
from wrong import SAMPLE

from jaxgpt.data import open_mixture
from jaxgpt.errors import RESUMABLE
from jaxgpt.planner.trial import MOST
from jaxgpt.training import checkpoint, metrics, parity
from jaxgpt.training.folder import stored_config

HOST = socket.gethostname()
MESHES = {2: ("data=2,tensor=2", "pipe=2,fsdp=2"), 4: ("fsdp=2,tensor=2",)}
"""By number of processes; of four devices, one or two in each process."""
CONFIG = run_config(GPT, global_batch=16, dtype="fp32")
BLEND = "0.5:{0}/a.txt,0.3:{0}/b.txt,0.2:{0}/c.txt"
ORDER = "ab6c65b596af153119be6a0709e654d424f70a196d485118e54adefed476d62e"
"""SHA-256 of (source, sample) of the first 10,000 samples of the blend."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and what processes compute on them."""
    where = tmp_path_factory.mktemp("many")
    for name, size in (("a", 4000), ("b", 1500), ("c", 700)):
        (where / f"{name}.txt").write_text(name * size)
    (where / "text.txt").write_text(text())
    return where


# The numbers of one process


@pytest.fixture(scope="module", params=[2, 4])
def traces(request: pytest.FixtureRequest, folder: Path) -> tuple[int, Path]:
    count = request.param
    given = {
        "meshes": MESHES[count],
        "devices": 4,
        "data": BLEND.format(folder),
        "model": dataclasses.asdict(GPT),
        "config": {"global_batch": 16, "lr": CONFIG.lr, "epsilon": CONFIG.epsilon, "warmup": 2, "steps": 10 * count},
    }
    given["config"]["dtype"] = "fp32"
    with started(command("trace", folder, **given), count, JAXGPT_CACHE=str(folder / "cache")) as processes:
        found = ended(processes)
    assert [status for status, _ in found] == [0] * count, found
    assert re.match(rf"{count} processes: 0 on {HOST}: {4 // count} x cpu", found[0][1])
    assert [said for _, said in found[1:]] == [""] * (count - 1)
    return count, folder


@pytest.fixture(scope="module")
def one() -> parity.Trace:
    """What one device computes."""
    return parity.trace(CONFIG, "data=1", batches(CONFIG, 2))


def test_processes_compute_what_one_device_does(traces: tuple[int, Path], one: parity.Trace) -> None:
    count, where = traces
    for which in MESHES[count]:
        with np.load(where / f"{which}.npz") as found:
            parts = {kind: {n.partition(" ")[2]: found[n] for n in found if n.startswith(kind)} for kind in ("g", "p")}
            many = parity.Trace(found["losses"], found["norms"], parts["g"], parts["p"])
        worst = parity.differences(one, many)[0]
        assert worst.holds, (which, worst)


def test_order_is_one_constant(traces: tuple[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    count, where = traces
    for which in MESHES[count]:
        source, sample = np.full((2, 10_000), -1)
        for index in range(count):
            with np.load(where / f"order-{which}-{index}.npz") as found:
                here = found["places"] < 10_000
                source[found["places"][here]] = found["source"][here]
                sample[found["places"][here]] = found["sample"][here]
        assert source.min() == sample.min() == 0
        assert hashlib.sha256(np.stack([source, sample]).tobytes()).hexdigest() == ORDER
    monkeypatch.setenv("JAXGPT_CACHE", str(where / "cache"))
    whole = open_mixture(BLEND.format(where), "bytes", 256, 0.1).order(GPT.seq, 0, np.arange(10_000))
    assert hashlib.sha256(np.stack(whole).tobytes()).hexdigest() == ORDER


def test_every_process_reads_its_own_part_alone(traces: tuple[int, Path]) -> None:
    count, where = traces
    for which in MESHES[count]:
        first = []
        for index in range(count):
            with np.load(where / f"order-{which}-{index}.npz") as found:
                first.append({int(place) for place in found["places"] if place < 16})
        assert set.union(*first) == set(range(16))
        # Over processes lies the first axis: those of another stage take the same samples.
        assert [len(part) for part in first] == [16 if "pipe" in which else 8] * count


def test_what_is_not_finite_is_named_alike_by_all(traces: tuple[int, Path]) -> None:
    """Of four microbatches of four samples; the first two samples have no target, and so no loss."""
    count, where = traces
    for which in MESHES[count]:
        first, *others = [json.loads((where / f"culprits-{which}-{i}.json").read_text()) for i in range(count)]
        assert others == [first] * (count - 1)
        named = [(one["what"], one["name"], one["layer"], one["microbatch"], one["samples"]) for one in first]
        assert named == [
            ("activation", "blocks.attention", 0, SAMPLE // 4, [SAMPLE]),
            ("loss", "the loss", None, 0, [2, 3]),
            ("gradient", "blocks.mlp.up.bias", 1, 0, [0, 1, 2, 3]),
            ("nothing", "", None, None, []),
        ], which


# A run


Run = Callable[..., Any]


@pytest.fixture
def told(folder: Path) -> Callable[..., list[str]]:
    """The command of a run."""

    def command(where: Path, **changes: Any) -> list[str]:
        given = {"steps": 6, "log_every": 1, "save_every": 2, "eval_every": 3, "prompt": "def", **changes}
        return [str(HERE), str(where), str(folder / "text.txt"), json.dumps(given)]

    return command


@pytest.fixture
def several(folder: Path, told: Callable[..., list[str]]) -> Run:
    """Starts the processes of a run."""

    def start(where: Path, count: int = 2, **changes: Any) -> Any:
        environment = {
            "JAXGPT_CACHE": str(folder / "cache"),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        return started(told(where, **changes), count, **environment)

    return start


MESH = "fsdp=2,tensor=2"


@pytest.fixture(scope="module")
def straight(folder: Path) -> Iterator[Path]:
    """A run of two processes with two devices each that nothing befell; made by the first test that needs it."""
    return folder / "straight"


def made(straight: Path, several: Run) -> Path:
    if not straight.exists():
        with several(straight, mesh=MESH) as processes:
            (zero, said), (one, nothing) = ended(processes)
        assert (zero, one, nothing) == (0, 0, ""), said
        assert said.count("2 processes: ") == 1
        assert (straight / "sample.txt").is_file()
        assert checkpoint.steps(straight / "checkpoints") == [2, 4, 6]
    return straight


@pytest.mark.parametrize("dies", [[1, "save", 5], [0, "step", 4]])
def test_one_is_killed_the_others_name_it_and_the_same_command_resumes_bit_for_bit(
    dies: list[Any], straight: Path, several: Run, tmp_path: Path
) -> None:
    made(straight, several)
    where, killed = tmp_path / "run", dies[0]
    with several(where, mesh=MESH, dies=dies) as processes:
        processes[killed].wait(timeout=LIMIT)
        found = ended(processes, within=60)
    assert found[killed][0] == -signal.SIGKILL
    status, said = found[1 - killed]
    assert status == RESUMABLE, said
    assert f"jaxgpt: error: process {killed} on {HOST} is gone" in said
    assert "Traceback" not in said
    (stacks,) = (where / "faults").glob(f"stacks-step-*-process-{1 - killed}.txt")
    text = stacks.read_text()
    assert text.startswith(f"process {killed} on {HOST} is gone")
    assert "; in phase " in text
    assert "Thread 0x" in text
    with several(where, mesh=MESH) as processes:
        (zero, said), (one, _) = ended(processes)
    assert (zero, one) == (0, 0), said
    assert re.search("resumed after step [24]", said)
    assert last_arrays(where) == last_arrays(straight)
    assert losses(where) == losses(straight)


def test_a_signal_to_one_saves_on_all_and_any_number_of_processes_goes_on(
    straight: Path, several: Run, tmp_path: Path
) -> None:
    made(straight, several)
    where = tmp_path / "run"
    with several(where, mesh=MESH, seconds=0.2) as processes:
        while not any(record["step"] >= 1 for record in metrics.read(where)):
            assert processes[0].poll() is None
            time.sleep(0.02)
        processes[1].send_signal(signal.SIGTERM)
        (zero, said), (one, nothing) = ended(processes)
    assert (zero, one) == (RESUMABLE, RESUMABLE), said
    assert nothing == ""
    assert f"process 1 on {HOST}" in said
    step = checkpoint.steps(where / "checkpoints")[-1]
    assert 1 <= step < 6
    assert f"stopped after step {step}, which is saved" in said
    for count, steps, on in ((1, 6, "data=2,tensor=2"), (2, 8, MESH)):
        with several(where, count, mesh=on, steps=steps) as processes:
            found = ended(processes)
        assert {status for status, _ in found} == {0}, found
    ours = [x for x in losses(where) if x[1] <= 5]
    theirs = [x for x in losses(straight) if x[1] <= 5]
    assert [x[:2] for x in ours] == [x[:2] for x in theirs]
    np.testing.assert_allclose([x[2] for x in ours], [x[2] for x in theirs], rtol=1e-5)


def test_processes_try_the_same_plans_and_take_the_same_one(several: Run, tmp_path: Path) -> None:
    with several(tmp_path / "run", mesh="auto", steps=2) as processes:
        (zero, said), (one, nothing) = ended(processes)
    assert (zero, one, nothing) == (0, 0, ""), said
    tried = re.findall(r"--mesh auto: tries ([a-z=0-9,]+), ", said)
    assert 2 <= len(tried) <= MOST
    assert stored_config(tmp_path / "run").mesh in tried


def test_what_is_wrong_is_said_once_by_all(several: Run, tmp_path: Path) -> None:
    with several(tmp_path / "run", mesh="data=3") as processes:
        found = ended(processes)
    assert [status for status, _ in found] == [2, 2], found
    said = "".join(out for _, out in found)
    assert said.startswith("jaxgpt: error: --mesh: its 3 devices cannot be shared evenly by 2 processes; take a mesh")
    assert said.count("\n") == 1
    assert not (tmp_path / "run" / "config.json").exists()
