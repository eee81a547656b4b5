"""Several processes on this machine: how the tests start them and what they run. Nobody is waited for without end.

Called as a program: many.py WHAT FOLDER JSON --coordinator HOST:PORT --processes N --process I. JAX is imported by what
needs it alone.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__)
LIMIT = 300.0
"""Seconds after which a process is killed, and the test fails."""
Ended = list[tuple[int, str]]
"""Exit status of each process, and what it said."""


VARIABLES = os.environ | {"PYTHONPATH": str(HERE.parent.parent), "JAX_PLATFORMS": "cpu"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def started(
    command: Sequence[str], count: int, indices: Sequence[int] | None = None, **environment: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of a command, each with what it must be told; killed at the end, whatever happens."""
    port, processes = free_port(), []
    variables = VARIABLES | environment
    try:
        for index in range(count) if indices is None else indices:
            told = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(count), "--process", str(index)]
            pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(subprocess.Popen([sys.executable, *command, *told], env=variables, **pipe))
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def ended(processes: Sequence[subprocess.Popen[str]], within: float = LIMIT) -> Ended:
    """Waits for all."""
    until = time.monotonic() + within
    return [
        (process.returncode, said)
        for process in processes
        for said, _ in [process.communicate(timeout=max(until - time.monotonic(), 0.1))]
    ]


def command(what: str, folder: Path, **fields: Any) -> list[str]:
    return [str(HERE), what, str(folder), json.dumps(fields)]


# What the processes run


def meet(_: Path, given: dict[str, Any], args: list[str]) -> int:
    """What each is to do once it has met the others: {"1": ["fail", "text", 2], ...}."""
    from jaxgpt.errors import UserError
    from jaxgpt.processes import peers
    from jaxgpt.processes.launch import launch

    me = launch(args)
    assert me is not None
    try:
        found, port = peers.meet(me, free_port)
    except UserError as error:
        print(error)
        return 2
    print(f"met {found.count} at {port}", flush=True)
    what, *rest = given.get(str(me.index), ["wait"])
    if what == "fail":
        found.fail(*rest)
    if what == "count":
        seconds, stop_at = rest
        passed = 0
        while not found.gate.ends():
            passed += 1
            if passed == stop_at:
                found.stop(15)
            time.sleep(seconds)
        print(f"passed {passed}, {found.gate.signal}")
        found.leave()
        time.sleep(0.5)
        found.close()
        return 0
    time.sleep(LIMIT)
    return 1


def culprits(program: Any, batch: dict[str, Any]) -> list[Any]:
    """What is named of a step whose activation, loss or gradient is not finite, and of one that is right."""
    from wrong import changed, with_unused

    from jaxgpt.training.blame import find

    right = program.init()["params"]
    activation = changed(program, right, "embedding.token.weight", 3e38, 127)
    loss = changed(program, right, "final_norm.scale", 3e38)
    gradient = changed(program, right, "blocks.mlp.up.weight", 1e30, 1)
    gradient = changed(program, gradient, "blocks.mlp.down.weight", 0, 1)
    return [find(program, params, with_unused(batch), 3) for params in (activation, loss, gradient, right)]


def trace(folder: Path, given: dict[str, Any], args: list[str]) -> int:
    """What meshes compute, gradients and parameters too, which samples each process reads of a blend, and what it finds
    where a step is not finite."""
    import jax
    import numpy as np
    from tiny import batches

    from jaxgpt.config import ModelConfig, RunConfig
    from jaxgpt.data import open_mixture
    from jaxgpt.processes import together
    from jaxgpt.processes.launch import launch
    from jaxgpt.sharding import mesh
    from jaxgpt.training import parity

    jax.config.update("jax_disable_most_optimizations", True)
    config = RunConfig(**{**given["config"], "model": ModelConfig(**given["model"])})
    small = dataclasses.replace(config, micro_batch=2)
    with together.Joined(launch(args)):
        devices, _ = mesh.prepare_devices(given["devices"])
        if together.is_first():
            print(together.described(devices))
        for text in given["meshes"]:
            found = parity.trace(config, text, batches(config, 2))
            if together.is_first():
                arrays = {f"gradient {n}": a for n, a in found.gradients.items()}
                arrays |= {f"parameter {n}": a for n, a in found.params.items()}
                np.savez(folder / f"{text}.npz", losses=found.losses, norms=found.norms, **arrays)
        for text in given["meshes"]:
            found = [dataclasses.asdict(one) for one in culprits(parity.program(small, text), batches(config, 1)[0])]
            (folder / f"culprits-{text}-{together.index()}.json").write_text(json.dumps(found))
        with together.first_alone("data"):
            mixture = open_mixture(given["data"], "bytes", 256, 0.1)
        for text in given["meshes"]:
            own = parity.program(config, text).own_samples
            places = np.concatenate([step * config.global_batch + own for step in range(10_000 // len(own) + 1)])
            source, sample = mixture.order(config.model.seq, config.seed, places)
            np.savez(folder / f"order-{text}-{together.index()}.npz", places=places, source=source, sample=sample)
    return 0


def main(what: str, folder: str, given: str, *args: str) -> int:
    return {"meet": meet, "trace": trace}[what](Path(folder), json.loads(given), list(args))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
