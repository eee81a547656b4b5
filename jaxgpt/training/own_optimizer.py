"""Training by an optimizer of a user's own: any optax.GradientTransformation, written for whole arrays.

Gradients are the step's. The update is a program without layouts in its types, in which the compiler adds whatever
communication it takes: a norm is that of all gradients, a product that of whole matrices, on every mesh.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, auto_axes

from jaxgpt.training.program import Program
from jaxgpt.training.step import Arrays, State


@dataclass(frozen=True)
class OwnOptimizer:
    """A program's steps by another optimizer than its own. Clipping and learning rate are the transformation's."""

    program: Program
    transformation: optax.GradientTransformation

    def begin_with(self, params: Arrays) -> State:
        """The state before the first step."""
        init = jax.jit(auto_axes(self.transformation.init, out_sharding=self._layouts))
        with jax.set_mesh(self.program.mesh):
            return {"params": params, "optimizer": init(params), "step": np.int32(0)}

    def step(self, state: State, batch: Arrays) -> tuple[State, Arrays]:
        """One step; the state is given up. Gives its loss."""
        loss, gradients, _ = self.program.gradients(state["params"], batch, state["step"])
        with jax.set_mesh(self.program.mesh):
            params, optimizer = self._update(state["params"], state["optimizer"], gradients)
        return {"params": params, "optimizer": optimizer, "step": np.int32(state["step"] + 1)}, {"loss": loss}

    @cached_property
    def _layouts(self) -> Any:
        """What has the name and shape of a parameter in the optimizer's state lies as it does, all else is whole."""
        params = self.program.targets()["params"]
        whole = NamedSharding(self.program.mesh, PartitionSpec())

        def layout(path: Any, leaf: Any) -> NamedSharding:
            target = params.get(getattr(path[-1], "key", None)) if path else None
            return target.sharding if target is not None and target.shape == leaf.shape else whole

        plain = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in params.items()}
        return jax.tree_util.tree_map_with_path(layout, jax.eval_shape(self.transformation.init, plain))

    @cached_property
    def _update(self) -> Any:
        def update(params: Arrays, optimizer: Any, gradients: Arrays) -> tuple[Arrays, Any]:
            updates, optimizer = self.transformation.update(gradients, optimizer, params)
            return optax.apply_updates(params, updates), optimizer

        return jax.jit(auto_axes(update, out_sharding=(self.program.shardings, self._layouts)), donate_argnums=(0, 1))
