"""A stage whose first blocks keep less for their backward than its others: two stages, one after the other.

Both run on the same arrays of weights and gradients, each on its share of a part's rows. What lies between forward and
backward is a pair, of what each keeps; so a ring of it is a pair of rings.
"""

from typing import Any, NamedTuple

import jax

from jaxgpt.pipeline.stage import Kept, Place, Rows, Stage, Weights

Pair = tuple[Kept, Kept]


class Grouped(NamedTuple):
    """A Stage of two: `first` runs the first `few` rows of each part, `rest` all others."""

    first: Stage
    rest: Stage
    few: int

    def forward(
        self, weights: Weights, x: jax.Array, rows: Rows, context: Any, into: Place | None = None
    ) -> tuple[jax.Array, Pair | Place]:
        """As Stage.forward."""
        first, rest = self._rows(rows)
        into_first, into_rest = (None, None) if into is None else _places(into)
        x, kept_first = self.first.forward(weights, x, first, context, into_first)
        x, kept_rest = self.rest.forward(weights, x, rest, context, into_rest)
        return x, _together(into, kept_first, kept_rest)

    def backward(
        self, weights: Weights, kept: Pair | Place, dy: jax.Array, rows: Rows, context: Any, gradients: Weights
    ) -> tuple[jax.Array, Weights]:
        """As Stage.backward."""
        first, rest = self._rows(rows)
        kept_first, kept_rest = _places(kept) if isinstance(kept, Place) else kept
        dy, gradients = self.rest.backward(weights, kept_rest, dy, rest, context, gradients)
        return self.first.backward(weights, kept_first, dy, first, context, gradients)

    def to_input(
        self, weights: Weights, kept: Place, dy: jax.Array, rows: Rows, context: Any, into: Place | None = None
    ) -> tuple[jax.Array, Any]:
        """As Stage.to_input."""
        first, rest = self._rows(rows)
        kept_first, kept_rest = _places(kept)
        into_first, into_rest = (None, None) if into is None else _places(into)
        dy, between_rest = self.rest.to_input(weights, kept_rest, dy, rest, context, into_rest)
        dy, between_first = self.first.to_input(weights, kept_first, dy, first, context, into_first)
        return dy, _together(into, between_first, between_rest)

    def to_weights(
        self, weights: Weights, kept: Place, between: Place, rows: Rows, context: Any, gradients: Weights
    ) -> Weights:
        """As Stage.to_weights."""
        first, rest = self._rows(rows)
        kept_first, kept_rest = _places(kept)
        between_first, between_rest = _places(between)
        gradients = self.first.to_weights(weights, kept_first, between_first, first, context, gradients)
        return self.rest.to_weights(weights, kept_rest, between_rest, rest, context, gradients)

    def _rows(self, rows: Rows) -> tuple[Rows, Rows]:
        """The rows of each."""
        return Rows(*(a[: self.few] for a in rows)), Rows(*(a[self.few :] for a in rows))


def _places(place: Place) -> tuple[Place, Place]:
    """The same place of each ring."""
    first, rest = place.ring
    return Place(first, place.number), Place(rest, place.number)


def _together(into: Place | None, first: Any, rest: Any) -> Any:
    """What both have made; written into the place, if there is one."""
    return (first, rest) if into is None else into._replace(ring=(first.ring, rest.ring))
