"""A run that takes no time to compile, and what its tests share: a bigram table in the place of the model.

Called as a program, this file is the command that the tests of signals and kills start: bigram.py RUN TEXT CHANGES.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.processes import together
from jaxgpt.processes.launch import launch
from jaxgpt.sharding.hosts import put, whole
from jaxgpt.training import checkpoint, folder, metrics, run, watchdog, zarr
from jaxgpt.training.program import Program

Tree = dict[str, Any]
HERE = Path(__file__)
TINY = ModelConfig(layers=1, width=16, heads=2, vocab=256, seq=8)
WORDS = ("one", "two", "three", "def", "return", "if", "while", "(", ")", ":", "\n")


def text() -> str:
    draw = np.random.default_rng(0)
    return " ".join(WORDS[i] for i in draw.integers(0, len(WORDS), 3000))


class Bigram(Program):
    """A table of next-token logits, split over fsdp and tensor, trained by momentum."""

    @cached_property
    def logical(self) -> dict[str, tuple[int, ...]]:
        return {"table": (self.config.model.vocab, 256)}

    @cached_property
    def compiled(self) -> Any:
        return SimpleNamespace(memory_analysis=lambda: None)

    def targets(self) -> Tree:
        split, whole = (NamedSharding(self.mesh, PartitionSpec(*axes)) for axes in (("fsdp", "tensor"), ()))
        table = jax.ShapeDtypeStruct((self.config.model.padded_vocab, 256), jnp.float32, sharding=split)
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        return {"params": {"table": table}, "mu": {"table": table}, "nu": {"table": table}, "step": step}

    def init(self) -> Tree:
        return jax.tree.map(lambda t: put(np.zeros(t.shape, t.dtype), t.sharding), self.targets())

    def place(self, batch: dict[str, np.ndarray]) -> Tree:
        return {n: put(a, NamedSharding(self.mesh, PartitionSpec())) for n, a in batch.items()}

    @property
    def own_samples(self) -> None:
        """Every device takes the whole batch."""

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        with jax.set_mesh(self.mesh):
            return _step(state, batch, self.config.lr)

    def decoding(self, params: Tree) -> "Chain":
        return Chain(whole(params["table"]))

    @cached_property
    def evaluate(self) -> Any:
        def loss(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
            with jax.set_mesh(self.mesh):
                return _loss(params["table"], batch)

        return loss


class Chain(NamedTuple):
    """A table that writes: what follows is the last token's row."""

    table: np.ndarray
    left: int = 1000

    def start(self, texts: Sequence[Sequence[int]], room: int) -> np.ndarray:
        return self.next([text[-1] for text in texts])

    def next(self, tokens: Sequence[int]) -> np.ndarray:
        return self.table[list(tokens)]


@jax.jit
def _loss(table: jax.Array, batch: Tree) -> tuple[jax.Array, jax.Array]:
    whole = jax.reshard(table, PartitionSpec())
    logits = whole.at[batch["inputs"]].get(mode="clip")
    valid = batch["targets"] >= 0
    picked = jnp.take_along_axis(logits, jnp.clip(batch["targets"], 0, 255)[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(valid, jax.nn.logsumexp(logits, -1) - picked, 0.0)), jnp.sum(valid)


@partial(jax.jit, donate_argnums=0, static_argnums=2)
def _step(state: Tree, batch: Tree, lr: float) -> tuple[Tree, Tree]:
    def mean(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, tokens = _loss(table, batch)
        return total / tokens, tokens

    table = state["params"]["table"]
    (loss, tokens), gradient = jax.value_and_grad(mean, has_aux=True)(table)
    mu = 0.9 * state["mu"]["table"] + gradient
    nu = state["nu"]["table"] + gradient**2
    new = {"params": {"table": table - lr * mu}, "mu": {"table": mu}, "nu": {"table": nu}, "step": state["step"] + 1}
    norm = jnp.sqrt(jnp.sum(jax.reshard(gradient, PartitionSpec()) ** 2))
    before = batch.get("undone", jnp.int32(0))
    good = jnp.isfinite(loss) & jnp.isfinite(norm) & (before == 0)
    new = jax.tree.map(partial(lax.select, good), new, state)
    undone = jnp.where(good, 0, before + 1)
    return new, {"loss": loss, "grad_norm": norm, "lr": jnp.float32(lr), "tokens": tokens, "undone": undone}


def config(text: Path, **changes: Any) -> RunConfig:
    base = RunConfig(
        model=TINY,
        data=str(text),
        tokenizer="bytes",
        mesh="fsdp=2",
        steps=12,
        global_batch=4,
        lr=30.0,
        log_every=2,
        eval_every=4,
        eval_tokens=64,
        save_every=5,
        epsilon=1e-5,
        dtype="fp32",
    )
    return dataclasses.replace(base, **changes)


def last_arrays(of: Path) -> dict[str, bytes]:
    """Every byte of the arrays in the last checkpoint."""
    where = checkpoint.path(of / "checkpoints", max(checkpoint.steps(of / "checkpoints"))) / "arrays"
    return {str(f.relative_to(where)): f.read_bytes() for f in where.rglob("*") if f.is_file()}


def losses(of: Path) -> list[tuple[str, int, float]]:
    return [(r["kind"], r["step"], r["loss"]) for r in metrics.read(of) if "loss" in r]


def snapshot(of: Path) -> dict[str, bytes]:
    return {str(f.relative_to(of)): f.read_bytes() for f in of.rglob("*") if f.is_file() and f.name != folder.LOCK}


def start(where: Path, data: Path, **changes: Any) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PYTHONPATH": str(HERE.parent.parent),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(data.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(HERE), str(where), str(data), json.dumps(changes)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def wait_for(process: subprocess.Popen[str], where: Path, step: int) -> None:
    """Until the run has a checkpoint and has passed a step."""
    while process.poll() is None:
        if checkpoint.steps(where / "checkpoints") and metrics.read(where)[-1]["step"] >= step:
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate()[0])


def main(where: str, data: str, changes: str, *args: str) -> int:
    """Trains as the tests ask; args: which of several processes it is."""
    given = json.loads(changes)
    kind: type[Program] = Bigram
    if given.pop("gpt", False):
        kind = Program
        given |= {"model": dataclasses.replace(TINY, layers=2, heads=4, dropout=0.1), "lr": 0.01, "global_batch": 8}
    seconds, hang = given.pop("seconds", 0.0), given.pop("hang", None)
    slow_save, dies = given.pop("slow_save", 0.0), given.pop("dies", None)
    watchdog.STEP = given.pop("patience", watchdog.STEP)
    place, step, write = kind.place, kind.step, zarr.write
    done = [0, 0]

    def die(when: str, count: int) -> None:
        """Where given says so: [process, "step" or "save", how many of those it has behind it]."""
        if dies == [together.index(), when, count]:
            os.kill(os.getpid(), signal.SIGKILL)

    def slow_place(self: Program, batch: dict[str, np.ndarray]) -> Tree:
        time.sleep(seconds)
        return place(self, batch)

    def hanging_step(self: Program, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        die("step", done[0])
        done[0] += 1
        if hang is not None and int(state["step"]) >= hang:
            # As a device would: the main thread is held outside of Python.
            np.linalg.svd(np.random.default_rng(0).normal(size=(6000, 6000)))
        return step(self, state, batch)

    def slow_write(*args: Any, **how: Any) -> zarr.Sums:
        die("save", done[1])
        done[1] += 1
        time.sleep(slow_save)
        return write(*args, **how)

    zarr.write = slow_write
    kind.place = slow_place
    kind.step = hanging_step
    run.Program = kind
    with together.Joined(launch(args)):
        return run.train(config(Path(data), **given), Path(where)).status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
