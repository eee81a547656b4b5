"""Kills at random times: a run that is killed and resumed again and again is, bit for bit, the run never killed.

    python experiments/kill_resume.py [--kills 50] [--seed 0]

A tiny GPT with dropout on fsdp=2,tensor=2, four microbatches a step, warm-up over half of the steps, a checkpoint after
every second step, written while the next steps run. Once it trains in peace, every step's checkpoint kept. Then chains
of processes go on in one folder, each killed (SIGKILL) at a time drawn at random after its first step, until a chain
comes to the last step; further chains follow until there were enough kills. After every kill: each checkpoint that is
there is read in full and is, byte for byte in its arrays, that of the run in peace at its step; each loss on record is
that run's; and the next process says that it goes on after the last one committed. At the end of a chain all losses,
those of the validations too, and the last checkpoint are those of the run in peace.

Told of each kill: the step, whether it fell into the program of a step (an accumulation over microbatches), into
warm-up, and into a save. Needs no GPU; takes about eight minutes on two cores.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from jaxgpt.checkpoint_verbs import damage
from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.data.workers import cores
from jaxgpt.training import manifest, metrics

RESULT = Path(__file__).parent / "results" / "kill_resume.json"
STEPS, WARMUP, MICROBATCHES = 80, 40, 4
LONGEST = 1.5
"""Seconds after the first step of a process within which it is killed."""
WORDS = ("one", "two", "three", "def", "return", "if", "while", "(", ")", ":", "\n")
Losses = dict[tuple[str, int, bool], float]


@dataclass(frozen=True)
class Kill:
    """Where a kill fell."""

    chain: int
    step: int
    """The step that ran, or the last one that had."""
    last: int
    """Step of the last checkpoint that was there."""
    accumulating: bool
    """Whether a step's program ran."""
    warming: bool
    saving: bool
    """Whether a checkpoint was half written."""


def configuration(data: Path, save_every: int, keep: int) -> RunConfig:
    """Of the run, whether in peace or not."""
    model = ModelConfig(layers=2, width=64, heads=4, vocab=256, seq=64, dropout=0.1)
    return RunConfig(
        model=model,
        data=str(data),
        tokenizer="bytes",
        mesh="fsdp=2,tensor=2",
        steps=STEPS,
        warmup=WARMUP,
        global_batch=16,
        micro_batch=16 // 2 // MICROBATCHES,
        log_every=1,
        eval_every=10,
        eval_tokens=2048,
        save_every=save_every,
        keep=keep,
        prompt="",
    )


def child(run: Path, data: Path, phase: Path, save_every: int, keep: int) -> int:
    """One process of a run; `phase` says which step it is at, and whether its program runs."""
    import jax

    from jaxgpt.training import run as runs
    from jaxgpt.training.program import Program

    told = os.open(phase, os.O_CREAT | os.O_WRONLY)
    real = Program.step

    def step(self: Program, state: Any, batch: Any) -> Any:
        number = int(state["step"]) + 1
        os.pwrite(told, f"{number:6} 1".encode(), 0)
        found = real(self, state, batch)
        jax.block_until_ready(found)
        os.pwrite(told, f"{number:6} 0".encode(), 0)
        return found

    Program.step = step
    return runs.train(configuration(data, save_every, keep), run).status


def started(run: Path, data: Path, save_every: int, keep: int) -> subprocess.Popen[str]:
    """Such a process."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAXGPT_CACHE": str(data.parent / "cache"),
        "JAX_COMPILATION_CACHE_DIR": str(data.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    words = [run, data, _phase(run), save_every, keep]
    command = [sys.executable, __file__, "--child", *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def _phase(run: Path) -> Path:
    return run.with_name(run.name + ".phase")


def digest(run: Path, step: int) -> str:
    """Of every byte of a checkpoint's arrays."""
    where = manifest.path(run / "checkpoints", step) / "arrays"
    found = hashlib.sha256()
    for file in sorted(f for f in where.rglob("*") if f.is_file()):
        found.update(str(file.relative_to(where)).encode() + file.read_bytes())
    return found.hexdigest()


def losses(run: Path) -> Losses:
    """All that are on record."""
    return {(r["kind"], r["step"], r.get("complete", False)): r["loss"] for r in metrics.read(run)}


class Peace:
    """The run that nobody kills."""

    def __init__(self, folder: Path, data: Path) -> None:
        run = folder / "peace"
        said, _ = (process := started(run, data, 1, STEPS)).communicate()
        assert process.returncode == 0, said
        self.digests = {step: digest(run, step) for step in manifest.steps(run / "checkpoints")}
        self.losses = losses(run)
        assert self.digests.keys() >= set(range(1, STEPS + 1))

    def check(self, run: Path) -> list[int]:
        """Holds a run against this one, and returns the steps of its checkpoints."""
        steps = manifest.steps(run / "checkpoints")
        for step in steps:
            assert not list(damage(run / "checkpoints", step)), f"{run}: the checkpoint of step {step} is damaged"
            assert digest(run, step) == self.digests[step], f"{run}: the checkpoint of step {step} differs"
        for key, loss in losses(run).items():
            assert loss == self.losses[key], f"{run}: {key} has the loss {loss}, not {self.losses[key]}"
        return steps


def chain(number: int, folder: Path, data: Path, peace: Peace, kills: int, draw: np.random.Generator) -> list[Kill]:
    """A run killed up to so many times, and then left to end."""
    run, found = folder / f"chain-{number}", list[Kill]()
    last = 0
    while True:
        _phase(run).unlink(missing_ok=True)
        process = started(run, data, 2, 3)
        killed = len(found) < kills and killed_at_random(process, run, draw)
        said, _ = process.communicate()
        if last:
            assert f"resumed after step {last}" in said or f"trained to its last step {STEPS}" in said, said
        if not killed:
            assert process.returncode == 0, said
            steps = peace.check(run)
            assert steps[-1] == STEPS
            assert losses(run) == peace.losses
            return found
        steps = peace.check(run)
        last = steps[-1] if steps else 0
        step, running = map(int, _phase(run).read_text().split())
        half = list((run / "checkpoints").glob("*.partial"))
        found.append(Kill(number, step, last, bool(running), step <= WARMUP, bool(half)))
        print(f"{found[-1]}", flush=True)


def killed_at_random(process: subprocess.Popen[str], run: Path, draw: np.random.Generator) -> bool:
    """Kills a process some time after its first step; False where it ended before."""
    while process.poll() is None and not (_phase(run).exists() and " 0" in _phase(run).read_text()):
        time.sleep(0.005)
    time.sleep(draw.uniform(0, LONGEST))
    process.kill()
    return process.wait() == -signal.SIGKILL


def main() -> int:
    """Kills, compares, prints, and keeps the result beside this file; an assertion fails where a run differs."""
    if sys.argv[1:2] == ["--child"]:
        run, data, phase, save_every, keep = sys.argv[2:]
        return child(Path(run), Path(data), Path(phase), int(save_every), int(keep))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the times")
    given = parser.parse_args()
    draw = np.random.default_rng(given.seed)
    found: list[Kill] = []
    chains = 0
    with TemporaryDirectory() as name:
        data = Path(name) / "text.txt"
        data.write_text(" ".join(WORDS[i] for i in np.random.default_rng(0).integers(0, len(WORDS), 30_000)))
        peace = Peace(Path(name), data)
        while len(found) < given.kills:
            found += chain(chains, Path(name), data, peace, given.kills - len(found), draw)
            chains += 1
    fell = Counter(key for kill in found for key in ("accumulating", "warming", "saving") if getattr(kill, key))
    result = {
        "kills": len(found),
        "chains": chains,
        "bit for bit equal": True,
        "fell into": {**fell, "a step's program while a checkpoint was written": sum(_both(kill) for kill in found)},
        "most steps lost by one": max(kill.step - kill.last for kill in found),
    }
    print(json.dumps(result, indent=1))
    kept = {
        "command": shlex.join(["python", *sys.argv]),
        "cores": cores(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "versions": {"jax": jax.__version__, "python": platform.python_version(), "numpy": np.__version__},
        "results": result | {"each": [asdict(kill) for kill in found]},
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


def _both(kill: Kill) -> bool:
    return kill.accumulating and kill.saving


if __name__ == "__main__":
    sys.exit(main())
