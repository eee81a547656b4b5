"""What a model gives the pipeline's loop: the operations of a microbatch on one device."""

from typing import Any, Protocol, runtime_checkable

import jax

from jaxgpt.pipeline.stage import Kept, Place

Batch = dict[str, jax.Array]
Weights = dict[str, jax.Array]
Number = jax.Array | int


@runtime_checkable
class Operations(Protocol):
    """What a tick can do, on one device. x, y, dx, dy: [B, S, D]; ends: embedding, final norm and head, as used.

    Weights of the ends are made whole, of one tick, and added to the accumulated ones by `add`; those of a part's
    weights are added by `backward`.
    """

    @property
    def axes(self) -> tuple[str, ...]:
        """The manual axes, over which what operations return differs."""

    @property
    def in_order(self) -> bool:
        """Whether what needs nothing of each other is to be sent one after another (sharding.collectives.after)."""

    def ends(self) -> Weights:
        """Embedding, final norm and head, gathered."""

    def lookup(self, ends: Weights, batch: Batch) -> jax.Array:
        """Embeddings of a microbatch's tokens; all stages meet."""

    def start(self, ends: Weights, looked_up: jax.Array, batch: Batch) -> jax.Array:
        """The first block's input."""

    def forward(self, chunk: Number, x: jax.Array, batch: Batch, into: Place | None = None) -> tuple[jax.Array, Any]:
        """A part's output, and what its backward needs: stacked over the part's rows, or written into the place."""

    def head(self, ends: Weights, y: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, Weights]:
        """Loss, gradient towards y, and gradients of the ends; all stages meet. y: the last stage's counts."""

    def backward(
        self, chunk: Number, kept: Kept | Place, dy: jax.Array, batch: Batch, gradients: Weights
    ) -> tuple[jax.Array, Weights]:
        """The gradient towards a part's input, and accumulated gradients of blocks with the part's added."""

    def to_input(
        self, chunk: Number, kept: Place, dy: jax.Array, batch: Batch, into: Place | None = None
    ) -> tuple[jax.Array, Any]:
        """The first part of backward: the gradient towards a part's input, and what to_weights needs of it, stacked or
        written into the place."""

    def to_weights(self, chunk: Number, kept: Place, between: Place, batch: Batch, gradients: Weights) -> Weights:
        """The second part: accumulated gradients of blocks with the part's added."""

    def finish(self, ends: Weights, dx: jax.Array, batch: Batch, dends: Weights) -> Weights:
        """Weights of the ends with the embedding's added; all stages meet. dx: the first stage's counts."""

    def add(self, gradients: Weights, dends: Weights) -> Weights:
        """Accumulated gradients with those of the ends added."""
