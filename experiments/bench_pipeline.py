"""Two stages on a core each against all the work on one core: how much of a pipeline's time is more than its bubble.

    python experiments/bench_pipeline.py [--microbatches 16] [--schedule 1f1b] [--steps 20]

Two processes, each with one device and kept on a core of its own, run a step over pipe=2; a third, on one of these
cores, runs the same step alone, in turn with them. The ideal is (m + p - 1) / m of half the time that one core takes:
half of the work, and the bubble of m microbatches on p = 2 stages. Linux only, since processes are kept on cores.
"""

import argparse
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from _bench import Contestant, in_turn, own_output, quartiles, serve

RESULT = Path(__file__).parent / "results" / "bench_pipeline.json"
STAGES = 2
ONE, PIPELINE = "one core", "pipeline"
ALLOWED = 1.2
"""Times the ideal, at 16 microbatches."""
SHAPE = {"layers": 24, "width": 384, "heads": 6, "seq": 256, "vocab": 256}
MICRO_BATCH = 2


def run(given: argparse.Namespace) -> None:
    """A process: of the pipeline's two, or the one that runs alone."""
    stage, stages = given.stage or 0, 1 if given.stage is None else STAGES
    answers = own_output()
    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[stage]])
    from jaxgpt import host_memory

    host_memory.keep()  # as the trainer does, before JAX starts
    import jax
    import numpy as np

    from jaxgpt import ModelConfig, RunConfig
    from jaxgpt.sharding import mesh
    from jaxgpt.training.program import Program

    jax.config.update("jax_num_cpu_devices", 1)
    if stages > 1:
        jax.distributed.initialize(f"localhost:{given.port}", num_processes=stages, process_id=stage)
    batch = given.microbatches * MICRO_BATCH
    config = RunConfig(
        model=ModelConfig(**SHAPE),
        global_batch=batch,
        micro_batch=MICRO_BATCH,
        dtype="fp32",
        mesh=f"pipe={stages}",
        schedule=given.schedule,
    )
    program = Program(config, mesh.build(mesh.parse(config.mesh), jax.devices()))
    state, draw = program.init(), np.random.default_rng(0)

    def step() -> float:
        nonlocal state
        tokens = draw.integers(0, SHAPE["vocab"], (batch, SHAPE["seq"] + 1), dtype=np.int32)
        state, metrics = program.step(state, program.place({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}))
        return float(metrics["loss"].addressable_data(0))

    if stage == 0:
        serve(step, {"jax": jax.__version__, "python": platform.python_version()}, answers)
        os._exit(0)  # the other stage waits in the middle of a step that never comes
    while True:
        step()


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Measures, prints, and keeps the result beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each")
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone or given.stage is not None:
        run(given)
        return 0
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < STAGES:
        sys.exit("two cores are needed, on Linux")
    settings = ["--microbatches", str(given.microbatches), "--schedule", given.schedule, "--port", str(free_port())]
    command = [sys.executable, __file__, *settings]
    second = subprocess.Popen([*command, "--stage", "1"], stderr=subprocess.DEVNULL)
    try:
        pipeline, one = Contestant(PIPELINE, [*command, "--stage", "0"]), Contestant(ONE, [*command, "--alone"])
        samples, _ = in_turn([pipeline, one], given.steps, 3, given.steps)
        pipeline.close(), one.close()
    finally:
        second.kill()
    found = {name: quartiles(each) for name, each in samples.items()}
    m = given.microbatches
    ideal = (m + STAGES - 1) / m * found[ONE].median / STAGES
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {platform.system()}",
        "versions": pipeline.about,
        "model": SHAPE | {"micro_batch": MICRO_BATCH},
        "microbatches": m,
        "schedule": given.schedule,
        "milliseconds": {name: [round(1e3 * t, 1) for t in (q.first, q.median, q.third)] for name, q in found.items()},
        "ideal milliseconds": round(1e3 * ideal, 1),
        "times the ideal": round(found[PIPELINE].median / ideal, 3),
        "allowed": ALLOWED,
    }
    print(json.dumps(result, indent=1))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
