"""The model as a flax NNX module: its parameters in a tree, stacked over layers, and what calls it."""

import operator
from collections.abc import Callable, Mapping

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxgpt.config import ModelConfig
from jaxgpt.model.parameters import parameters

ArrayLike = jax.Array | np.ndarray
Forward = Callable[[dict[str, jax.Array], ArrayLike], jax.Array]
"""(parameters by name, tokens) -> logits."""


class Part(nnx.Module):
    """A named part of the model; its attributes are parameters and further parts."""


class GPT(nnx.Module):
    """A container of parameters, wherever they lie: model.blocks.mlp.up.weight is [layers, embed, mlp].

    Each nnx.Param carries the names of its dimensions as `dims`. Any tool for NNX works on it: nnx.state, nnx.split,
    nnx.display. Mathematics and layouts are functions of the arrays, so the module holds neither.
    """

    def __init__(self, config: ModelConfig, arrays: Mapping[str, jax.Array], forward: Forward) -> None:
        self.config = config
        self.forward = forward
        for name, parameter in parameters(config).items():
            *path, last = name.split(".")
            part: nnx.Module = self
            for step in path:
                if not hasattr(part, step):
                    setattr(part, step, Part())
                part = getattr(part, step)
            setattr(part, last, nnx.Param(arrays[name], dims=parameter.dims))

    def arrays(self) -> dict[str, jax.Array]:
        """The parameters by name, as they are now."""
        return {name: operator.attrgetter(name)(self)[...] for name in parameters(self.config)}

    def __call__(self, tokens: Int[ArrayLike, "B S"]) -> Float[Array, "B S V"]:
        """fp32 logits of every entry of the (unpadded) vocabulary."""
        return self.forward(self.arrays(), tokens)
