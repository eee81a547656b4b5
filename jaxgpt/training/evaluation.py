"""Loss over stored tokens, exact on every mesh: each token is counted once, padding never.

Documents are read as in training: what --documents takes out of the loss is not counted here either.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxgpt.data.loader import NO_TARGET, Batch, strange
from jaxgpt.data.megatron import Documents
from jaxgpt.data.mixture import validation_batches
from jaxgpt.errors import UserError
from jaxgpt.training.program import Program


@dataclass(frozen=True)
class Figures:
    """What a model makes of a text."""

    loss: float
    """Nats a token."""
    tokens: int
    """Tokens predicted."""
    bits_per_byte: float | None = None
    """None where only a part of the text was predicted."""

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def rows(self) -> list[tuple[str, object]]:
        """For a table."""
        rows: list[tuple[str, object]] = [
            ("loss, nats a token", f"{self.loss:.4f}"),
            ("perplexity", f"{self.perplexity:.4g}"),
            ("tokens", self.tokens),
        ]
        if self.bits_per_byte is not None:
            rows.insert(2, ("bits per byte", f"{self.bits_per_byte:.4f}"))
        return rows


def measure(
    program: Program,
    params: dict[str, jax.Array],
    tokens: Sequence[np.ndarray],
    documents: Sequence[Documents],
    *,
    limit: int | None = None,
    size: int | None = None,
    stride: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Figures | None:
    """The mean loss of the tokens of one or several texts, in one pass; None where `stopped` says so meanwhile.

    documents: where they begin in each text. limit: most tokens read, spread evenly over each text. size: UTF-8 bytes
    of all texts, for bits per byte. stride: how far a window of the context's length moves on: every token is predicted
    once, with context - stride tokens before it at least, or all that there are; None: windows that do not overlap.
    """
    values: list[tuple[float, int]] = []
    seq, edges = program.config.model.seq, program.config.documents
    for batch in validation_batches(tokens, seq, program.micro_batch, limit, stride, documents, edges):
        if stopped():
            return None
        _refuse_strange(batch, program.config.model.vocab)
        # Read before the next is dispatched: two programs in flight, neither waiting for the other's result, can each
        # hold threads that the other's collectives wait for, where virtual devices share the host's threads.
        loss, count = jax.device_get(program.evaluate(params, program.place(batch)))
        values.append((float(loss), int(count)))
    total, counted = math.fsum(loss for loss, _ in values), sum(count for _, count in values)
    all_of_it = counted == sum(len(text) - 1 for text in tokens)
    bits = None if size is None or limit is not None or not all_of_it else total / math.log(2) / size
    return Figures(total / counted, counted, bits)


def _refuse_strange(batch: Batch, vocab: int) -> None:
    """Raises UserError where tokens that others have made are of another tokenizer: a lookup would take the nearest."""
    targets = batch["targets"]
    for tokens in (batch["inputs"], targets[targets != NO_TARGET]):
        if (token := strange(tokens, vocab)) is None:
            continue
        raise UserError(
            f"--data: token {token} of the validation part is outside of the model's {vocab:,} entries; give "
            "--tokenizer the one that made these files"
        )
