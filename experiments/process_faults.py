"""Processes killed at random times: the others must end by themselves and name the one that is gone; then all resume.

    python experiments/process_faults.py --kills 20 --processes 2 --out experiments/results/process_faults.json

A run of the small model below is started as often as it is killed, until it has finished, and then another, until
there were enough kills; each time one process, drawn at random, is killed with SIGKILL at a random moment between its
start and its end. Kept of each kill: how long the others took to end, with which status, what process 0 (or, where that
was killed, process 1) said, and how far the run was. The last checkpoint and all losses must be those of a run that
nothing befell, byte for byte. Needs two cores.
"""

import argparse
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from jaxgpt.errors import RESUMABLE
from jaxgpt.training import checkpoint, metrics

LIMIT = 60.0
"""Seconds within which the others must have ended."""
STEPS = 400
FLAGS = (
    "--data stdlib --tokenizer bytes --validation 0.001 --layers 2 --width 64 --heads 4 --kv-heads 2 --seq 64 "
    f"--steps {STEPS} --global-batch 16 --warmup 10 --save-every 5 --eval-every 50 --eval-tokens 4096 "
    "--log-every 5 --keep 3 --dropout 0.1"
).split()


@dataclass(frozen=True)
class Kill:
    """One process killed."""

    process: int
    after: float
    """Seconds after the start."""
    step: int
    """Step of the last record by then; -1: none."""
    saving: bool
    """Whether a checkpoint was being written."""
    seconds: float
    """Until all others had ended."""
    statuses: list[int]
    named: bool
    """Whether a line names the process."""
    said: str


def command(run: Path, processes: int, port: int, index: int) -> list[str]:
    mesh = f"fsdp={processes},tensor=2"
    told = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(processes), "--process", str(index)]
    return [sys.executable, "-m", "jaxgpt", "train", "--run", str(run), "--mesh", mesh, *FLAGS, *told]


def start(run: Path, processes: int, logs: Path) -> list[subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return [
        subprocess.Popen(
            command(run, processes, port, index),
            env=environment,
            stdout=(logs / f"{index}.txt").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for index in range(processes)
    ]


def wait(started: list[subprocess.Popen[bytes]], within: float) -> list[int | None]:
    """Exit statuses; None of one that had to be killed after so many seconds."""
    until = time.monotonic() + within
    statuses: list[int | None] = []
    for process in started:
        try:
            statuses.append(process.wait(max(until - time.monotonic(), 0.01)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            statuses.append(None)
    return statuses


def struck(run: Path, processes: int, logs: Path, draw: random.Random, longest: float) -> Kill | None:
    """Starts the run and kills one of its processes; None where it had finished before."""
    started = start(run, processes, logs)
    victim, after = draw.randrange(processes), draw.uniform(0, longest)
    began = time.monotonic()
    while time.monotonic() - began < after and any(one.poll() is None for one in started):
        time.sleep(0.01)
    if all(one.poll() is not None for one in started):
        wait(started, LIMIT)
        return None
    records = metrics.read(run)
    saving = bool(list((run / "checkpoints").glob("*.partial")))
    started[victim].send_signal(signal.SIGKILL)
    at = time.monotonic()
    statuses = wait(started, LIMIT)
    seconds = time.monotonic() - at
    speaker = 1 if victim == 0 else 0
    said = [line for line in (logs / f"{speaker}.txt").read_text().splitlines() if "jaxgpt: error" in line]
    others = [-1 if one is None else one for i, one in enumerate(statuses) if i != victim]
    line = said[-1] if said else ""
    named = re.search(rf"\bprocess {victim}\b", line) is not None
    step = records[-1]["step"] if records else -1
    return Kill(victim, round(after, 2), step, saving, round(seconds, 2), others, named, line)


def bytes_of(run: Path) -> dict[str, bytes]:
    where = checkpoint.path(run / "checkpoints", STEPS) / "arrays"
    return {str(file.relative_to(where)): file.read_bytes() for file in where.rglob("*") if file.is_file()}


def losses(run: Path) -> list[tuple[str, int, float]]:
    return [(record["kind"], record["step"], record["loss"]) for record in metrics.read(run)]


def ended_well(kill: Kill) -> bool:
    """Whether the others ended in time, named the one that was killed, and said that the run goes on; or, where it was
    killed before they had met, that it never came (status 2)."""
    never_came = kill.said.startswith("jaxgpt: error: --processes")
    return kill.named and kill.seconds < LIMIT and set(kill.statuses) == {2 if never_came else RESUMABLE}


def same(run: Path, straight: Path) -> bool:
    """Whether a run that went on is, byte for byte, the one that nothing befell."""
    return bytes_of(run) == bytes_of(straight) and losses(run) == losses(straight)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    draw = random.Random(told.seed)
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        straight, run = logs / "straight", logs / "run"
        began = time.monotonic()
        if wait(start(straight, told.processes, logs), 1800) != [0] * told.processes:
            print((logs / "0.txt").read_text())
            return 1
        whole = time.monotonic() - began
        equal, runs = True, 1
        while len(kills) < told.kills:
            # Runs that are resumed are shorter: most kills fall between the start and the last step.
            found = struck(run, told.processes, logs, draw, min(whole, 30.0))
            if found is None:
                equal, runs = equal and same(run, straight), runs + 1
                shutil.rmtree(run)
                continue
            kills.append(found)
            print(found, flush=True)
        finished = wait(start(run, told.processes, logs), 1800) == [0] * told.processes
        equal = equal and finished and same(run, straight)
    good = equal and all(map(ended_well, kills))
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "processes": told.processes,
        "runs": runs,
        "seconds_of_a_straight_run": round(whole, 1),
        "resumed_to_the_end": finished,
        "bit_for_bit": equal,
        "longest_end": max((kill.seconds for kill in kills), default=0.0),
        "holds": good,
        "kills": [asdict(kill) for kill in kills],
    }
    told.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(kills)} kills; bit for bit: {equal}; all named and ended: {good}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
