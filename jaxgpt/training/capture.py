"""An activation of one block, as it lies on the mesh: the forward, run as far as that block."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.errors import UserError
from jaxgpt.model.taps import SITES, as_far_as
from jaxgpt.sharding.named import relayout
from jaxgpt.training.step import Arrays, Step, on_mesh, state_specs


class Site(NamedTuple):
    """Where in the model."""

    layer: int
    name: str
    """One of taps.SITES."""


def site(name: str, layers: int) -> Site:
    """What "blocks.3.attention", "blocks.3.mlp" or "blocks.3" names. Raises UserError for other names."""
    lead, _, rest = name.partition(".")
    layer, _, inside = rest.partition(".")
    if lead != "blocks" or not layer.isdecimal() or inside not in SITES or name.endswith("."):
        raise UserError(f"{name}: is no activation; known are blocks.N, blocks.N.attention and blocks.N.mlp")
    if int(layer) >= layers:
        raise UserError(f"{name}: the model has {layers} blocks, numbered from 0")
    return Site(int(layer), inside)


def captured(step: Step, mesh: Mesh, wanted: Site) -> Callable[[Arrays, jax.Array], jax.Array]:
    """(params, tokens as Program.place_tokens lays them) -> the activation [B, S, D], split as it lies in the model."""
    whole = step.layout.batch()
    specs = PartitionSpec(*whole[1:])
    inputs = (state_specs(step)["params"], specs)
    return jax.jit(on_mesh(step, mesh, partial(_forward, step, wanted), inputs, specs))


def _forward(step: Step, wanted: Site, params: Arrays, tokens: jax.Array) -> jax.Array:
    x, _ = step.stream(params, tokens, partial(as_far_as, wanted.layer, lambda taken: taken[wanted.name]))
    return relayout(x, "batch seq embed")


def in_text_order(x: jax.Array, order: Any) -> jax.Array:
    """x [B, S, D] with its sequence in another order, split as before."""
    where = x.sharding
    assert isinstance(where, NamedSharding)
    return x.at[:, order].get(out_sharding=where)
