"""The model as a flax NNX module: its parameters in a tree, stacked over layers, and what calls it."""

from collections.abc import Callable, Mapping

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxgpt.config import ModelConfig
from jaxgpt.model.parameters import parameters

Forward = Callable[[dict[str, jax.Array], jax.Array], jax.Array]
"""(parameters by name, tokens) -> logits."""


class Part(nnx.Module):
    """A named part of the model; its attributes are parameters and further parts."""


class GPT(nnx.Module):
    """A container of parameters, wherever they lie: model.blocks.attention.query.weight is [layers, embed, heads, head].

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
        found = {}
        for name in parameters(self.config):
            part: object = self
            for step in name.split("."):
                part = getattr(part, step)
            found[name] = part[...] if isinstance(part, nnx.Param) else part
        return found

    def __call__(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        """fp32 logits of every entry of the (unpadded) vocabulary."""
        return self.forward(self.arrays(), tokens)
