"""What a model holds: every parameter's name, shape, named dimensions and start, as one table read by all others."""

import math
import zlib
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgpt.config import ModelConfig


@dataclass(frozen=True)
class Parameter:
    """One array of the model. Blocks are stacked: their first dimension is `layers`."""

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    """Names of the dimensions; the layout table says where each lies."""
    std: float | Literal["zeros", "ones"]
    """Standard deviation at the start, or a constant."""
    logical: tuple[int, ...]
    """Shape without the padding of the vocabulary, and without empty rows."""
    rows: tuple[int, ...] | None = None
    """Logical layer of each row of a block's stacked array, below 0 where it is empty; None: the layers in order."""

    @property
    def decays(self) -> bool:
        """Whether weight decay acts on it: on matrices, not on biases and norms."""
        return not isinstance(self.std, str)


def _block(config: ModelConfig) -> dict[str, tuple[str, float | Literal["zeros", "ones"]]]:
    """The parameters of one block: dimension names and start. GPT-2 scales what adds to the residual stream."""
    std, residual = config.init_std, config.init_std / math.sqrt(2 * config.layers)
    table: dict[str, tuple[str, float | Literal["zeros", "ones"]]] = {}
    for norm in ("norm1", "norm2"):
        table[f"{norm}.scale"] = ("norm", "ones")
        if config.norm_bias:
            table[f"{norm}.bias"] = ("norm", "zeros")
    for part, heads in (("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads")):
        table[f"attention.{part}.weight"] = (f"embed {heads} head", std)
        if config.qkv_bias:
            table[f"attention.{part}.bias"] = (f"{heads} head", "zeros")
    if config.qk_norm:
        table |= {f"attention.{part}_norm.scale": ("head", "ones") for part in ("query", "key")}
    table["attention.out.weight"] = ("heads head embed", residual)
    if config.attention_bias:
        table["attention.out.bias"] = ("norm", "zeros")
    for part in ("gate", "up") if config.gated else ("up",):
        table[f"mlp.{part}.weight"] = ("embed mlp", std)
        if config.mlp_bias:
            table[f"mlp.{part}.bias"] = ("mlp", "zeros")
    table["mlp.down.weight"] = ("mlp embed", residual)
    if config.mlp_bias:
        table["mlp.down.bias"] = ("norm", "zeros")
    return table


def dimensions(config: ModelConfig) -> dict[str, int]:
    """Sizes of the named dimensions of parameters. `norm` is the residual stream's width where it is never split."""
    return {
        "layers": config.layers,
        "embed": config.width,
        "norm": config.width,
        "heads": config.heads,
        "kv_heads": config.kv,
        "head": config.head,
        "mlp": config.mlp,
        "vocab": config.padded_vocab,
        "positions": config.seq,
    }


def parameters(config: ModelConfig) -> dict[str, Parameter]:
    """Every parameter of the model by name, in the order in which they act."""
    table: dict[str, tuple[str, float | Literal["zeros", "ones"]]] = {
        "embedding.token.weight": ("vocab embed", config.init_std)
    }
    if config.positions == "learned":
        table["embedding.position.weight"] = ("positions embed", config.init_std)
    table |= {f"blocks.{name}": (f"layers {dims}", std) for name, (dims, std) in _block(config).items()}
    table["final_norm.scale"] = ("norm", "ones")
    if config.norm_bias:
        table["final_norm.bias"] = ("norm", "zeros")
    if not config.tied:
        table["head.weight"] = ("vocab embed", config.init_std)
    sizes = dimensions(config)
    unpadded = sizes | {"vocab": config.vocab}
    return {
        name: Parameter(
            shape=tuple(sizes[d] for d in dims.split()),
            dims=tuple(dims.split()),
            std=std,
            logical=tuple(unpadded[d] for d in dims.split()),
        )
        for name, (dims, std) in table.items()
    }


def placed(table: dict[str, Parameter], rows: tuple[int, ...] | None) -> dict[str, Parameter]:
    """The table with blocks stacked in these rows (pipeline.placement's order)."""
    if rows is None:
        return table
    return {
        name: replace(p, shape=(len(rows), *p.shape[1:]), rows=rows) if p.dims[0] == "layers" else p
        for name, p in table.items()
    }


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model, padding not counted."""
    return sum(math.prod(p.logical) for p in parameters(config).values())


DRAWN_STD = math.sqrt(12 * (256**2 - 1) / 12)
"""Standard deviation of the sum of twelve random bytes."""


def _drawn(key: jax.Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Whole numbers, normally distributed but for their tails, which end at six deviations: sums of twelve bytes, less
    their mean. Exact, where a normal by the inverse of erf differs in its last bit between one compiled loop and
    another, and so between meshes."""

    def add(word: jax.Array | int, total: jax.Array) -> jax.Array:
        bits = jax.random.bits(jax.random.fold_in(key, word), shape, jnp.uint32)
        pairs = (bits & 0x00FF00FF) + ((bits >> 8) & 0x00FF00FF)
        return total + (pairs & 0xFFFF) + (pairs >> 16)

    # in a loop, so that one word of each element is held and not three
    total = jax.lax.fori_loop(0, 3, add, jnp.zeros(shape, jnp.uint32))
    return (total.astype(jnp.int32) - 12 * 255 // 2).astype(jnp.float32)


def start(parameter: Parameter, name: str, seed: jax.Array) -> Float[Array, "..."]:
    """The parameter's first value, fp32: a function of seed, name and logical layer alone, so that no mesh, stage or
    number of layers before it changes it. Padded entries are zero, and stay so: they get neither gradient nor decay.

    seed: a key made by jax.random.key.
    """
    if parameter.std == "zeros":
        return jnp.zeros(parameter.shape)
    if parameter.std == "ones":
        held = jnp.asarray(parameter.rows or [0] * parameter.shape[0]) >= 0
        return jnp.broadcast_to(_first_only(held, len(parameter.shape)), parameter.shape).astype(jnp.float32)
    key = jax.random.fold_in(seed, zlib.crc32(name.encode()))
    if parameter.dims[0] == "layers":
        layers = jnp.asarray(range(parameter.shape[0]) if parameter.rows is None else parameter.rows)
        keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(layers)
        drawn = jax.vmap(lambda k: _drawn(k, parameter.shape[1:]))(keys)
        held = layers >= 0
    else:
        drawn = _drawn(key, parameter.shape)
        held = jnp.arange(parameter.shape[0]) < parameter.logical[0]
    value = drawn * (parameter.std / DRAWN_STD)
    if parameter.shape != parameter.logical:
        value = jnp.where(_first_only(held, value.ndim), value, 0.0)
    return value


def _first_only(of_rows: jax.Array, ndim: int) -> jax.Array:
    """An array over the first dimension, to be broadcast over the others."""
    return of_rows.reshape(-1, *(1,) * (ndim - 1))
