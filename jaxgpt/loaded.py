"""A trained run opened in a notebook: the sharded model, called, read and made to write."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxgpt.config import RunConfig
from jaxgpt.data import load_tokenizer
from jaxgpt.errors import require
from jaxgpt.inference.generate import generate
from jaxgpt.model.module import GPT, ArrayLike
from jaxgpt.training import derived
from jaxgpt.training.console import Console
from jaxgpt.training.program import Program
from jaxgpt.training.run import open_trained


@dataclass(frozen=True)
class Run:
    """A run's parameters on a mesh. `run.model(tokens)`, `run.generate("def ")`, `run.layouts()`."""

    config: RunConfig
    program: Program
    params: dict[str, jax.Array]
    tokenizer: Any
    step: int
    """Steps trained."""

    @cached_property
    def model(self) -> GPT:
        """The model as an NNX module; model(tokens [B, S]) -> fp32 logits [B, S, vocabulary]."""
        return GPT(self.config.model, self.params, self.logits)

    def logits(self, params: dict[str, jax.Array], tokens: ArrayLike) -> Float[Array, "B S V"]:
        """Logits of params for tokens [B, S], any B, any S up to the context length."""
        return self._forward(params, self._checked(np.asarray(tokens)))[..., : self.config.model.vocab]

    def _checked(self, tokens: np.ndarray) -> Int32[np.ndarray, "B S"]:
        model = self.config.model
        require(tokens.dtype.kind in "iu", "tokens", tokens.dtype, "must be whole numbers")
        two = tokens.ndim == 2 and tokens.size > 0
        require(two, "tokens", tokens.shape, "must have two dimensions, [batch, sequence], and none of them empty")
        require(tokens.shape[1] <= model.seq, "tokens", tokens.shape, f"are longer than the context of {model.seq}")
        wrong = tokens[(tokens < 0) | (tokens >= model.vocab)]
        require(not wrong.size, "tokens", wrong[:3], f"must be at least 0 and below the vocabulary's {model.vocab}")
        return tokens.astype(np.int32)

    def _forward(self, params: dict[str, jax.Array], tokens: np.ndarray) -> jax.Array:
        rows, columns = (-size % divisor for size, divisor in zip(tokens.shape, self.program.divisors, strict=True))
        padded = np.pad(tokens, ((0, rows), (0, columns)))
        logits = self.program.logits(params, self.program.place_tokens(padded))
        whole = jax.device_put(logits, jax.sharding.NamedSharding(self.program.mesh, jax.sharding.PartitionSpec()))
        return self.program.text_order(whole)[: tokens.shape[0], : tokens.shape[1]]

    def generate(
        self,
        prompt: str | list[str],
        max_tokens: int = 200,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> str | list[str]:
        """The text that the model writes after a prompt, or after each of several. The same seed, the same text."""
        prompts = [prompt] if isinstance(prompt, str) else prompt
        encoded = [self.tokenizer.encode(text) for text in prompts]
        for text, ids in zip(prompts, encoded, strict=True):
            require(len(ids) > 0, "--prompt", repr(text), "must have at least one token")
        require(len(prompts) > 0, "prompts", prompts, "must be one at least")
        require(max_tokens >= 1, "--tokens", max_tokens, "must be at least 1")
        require(0 <= seed < 2**64, "--seed", seed, "must be at least 0 and below 2**64")
        require(
            temperature == 0 or 1e-3 <= temperature < math.inf,
            "--temperature",
            temperature,
            "must be 0, for the likeliest token, or at least 0.001",
        )
        written = generate(
            partial(self.program.next_logits, self.params),
            [ids.tolist() for ids in encoded],
            self.config.model.seq,
            max_tokens,
            temperature,
            seed,
        )
        texts = [self.tokenizer.decode(ids) for ids in written]
        return texts[0] if isinstance(prompt, str) else texts

    def layouts(self) -> "Layouts":
        """How each parameter lies on the mesh: shape, and S(dimension) by axis."""
        return Layouts(derived.layout_rows(self.program))


@dataclass(frozen=True)
class Layouts:
    """A table of (parameter, shape, layout) that prints itself."""

    rows: Sequence[Sequence[object]]

    def __repr__(self) -> str:
        texts = [[str(cell) for cell in row] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts)
        return "\n".join(line.rstrip() for line in lines)


def load(run: str | Path, mesh: str = "") -> Run:
    """Opens a run's last whole checkpoint on any mesh ("tensor=2"; empty: one device).

    Raises UserError where the folder is no run, has no checkpoint, or the mesh does not fit.
    """
    folder = Path(run)
    trained = open_trained(folder, mesh or "data=1", Console())
    return Run(trained.config, trained.program, trained.params, load_tokenizer(folder / "tokenizer"), trained.step)
