"""Training on in memory: from parameters that are there, on a text, shown while it runs."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from jaxgpt.config import RunConfig
from jaxgpt.config_file import check_types
from jaxgpt.data import Text, Tokenizer, loader, open_text
from jaxgpt.errors import require
from jaxgpt.sharding import mesh
from jaxgpt.training.live import shown
from jaxgpt.training.own_optimizer import OwnOptimizer
from jaxgpt.training.program import Program


@dataclass(frozen=True)
class Fitted:
    """What training came to."""

    params: dict[str, jax.Array]
    losses: list[float]
    """Nats a token, of each step."""


def fit(
    program: Program,
    params: dict[str, jax.Array],
    tokenizer: Tokenizer,
    data: str,
    steps: int,
    quiet: bool = False,
    optimizer: optax.GradientTransformation | None = None,
    /,
    **fields: Any,
) -> Fitted:
    """Trains copies of the parameters; params themselves stay as they are.

    data: as --data. fields: fields of RunConfig, such as lr, global_batch or seed; what is not given is the run's own,
    but for the learning rate, whose warm-up is at most a tenth of the steps. The optimizer begins anew. optimizer: one
    of the user's own, in the place of AdamW, its schedule and clipping.
    Raises UserError where text or batch do not fit.
    """
    config = _config(program.config, steps, fields)
    acts = all(callable(getattr(optimizer, part, None)) for part in ("init", "update"))
    require(optimizer is None or acts, "optimizer", optimizer, "must be one of optax, such as optax.adamw(1e-3)")
    mesh.check(config, program.sizes)
    text = open_text(data, tokenizer)
    own = Program(config, program.mesh, program.replaced)
    trained: Program | OwnOptimizer = own if optimizer is None else OwnOptimizer(own, optimizer)
    state = trained.begin_with({name: array.copy() for name, array in params.items()})
    losses: list[float] = []
    with shown(steps, quiet) as told:
        for batch in _batches(text, config):
            state, metrics = trained.step(state, own.place(batch))
            losses.append(float(metrics["loss"]))
            told.step(losses)
    return Fitted(state["params"], losses)


def _config(config: RunConfig, steps: int, fields: dict[str, Any]) -> RunConfig:
    known = {field.name for field in dataclasses.fields(RunConfig)} - {"model", "mesh", "tokenizer", "data"}
    for name in fields:
        require(name in known, name, fields[name], f"is no field of a run; known are {', '.join(sorted(known))}")
    check_types(RunConfig, {"steps": steps, **fields})
    require(steps >= 1, "steps", steps, "must be at least 1")
    wanted = dataclasses.replace(config, steps=steps, warmup=min(config.warmup, steps // 10))
    if "global_batch" in fields:
        wanted = dataclasses.replace(wanted, micro_batch=None)
    return dataclasses.replace(wanted, **fields)


def _batches(text: Text, config: RunConfig) -> Iterator[loader.Batch]:
    tokens, seq, count = text.tokens, config.model.seq, config.global_batch
    samples = loader.samples_in(tokens, seq)
    for step in range(config.steps):
        places = np.arange(step * count, (step + 1) * count)
        starts = loader.sample_starts(len(tokens), samples, seq, config.seed, places)
        drawn = np.empty((count, seq + 1), np.int32)
        loader.copy_rows(tokens, starts, drawn, range(count))
        begins = None if config.documents == "joined" else loader.begins(text.documents, starts, seq + 1)
        yield loader.at_edges(drawn[:, :-1], drawn[:, 1:], begins, config.documents)
