"""A trained run, or a model of somebody else's, opened: the sharded model, called, read and made to write."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxgpt.config import RunConfig
from jaxgpt.data import Tokenizer
from jaxgpt.errors import UserError, require
from jaxgpt.inference.sampling import Sampling
from jaxgpt.inference.text import write
from jaxgpt.interop import beside
from jaxgpt.interop.export import export
from jaxgpt.model.module import GPT, ArrayLike
from jaxgpt.training import derived
from jaxgpt.training.console import Console
from jaxgpt.training.program import Program
from jaxgpt.training.run import open_trained


@dataclass(eq=False)
class Run:
    """A model's parameters on a mesh. `run(tokens)`, `run.generate("def ")`, `run.layouts()`."""

    config: RunConfig
    program: Program
    params: dict[str, jax.Array]
    tokenizer: Tokenizer | None
    step: int
    """Steps trained."""
    beside: beside.Beside
    """Files that lie beside the tokenizer: chat template, special tokens, how to generate."""

    @cached_property
    def model(self) -> GPT:
        """The model as an NNX module; model(tokens [B, S]) -> fp32 logits [B, S, vocabulary]."""
        return GPT(self.config.model, self.params, self.logits)

    def __call__(self, tokens: ArrayLike) -> Float[Array, "B S V"]:
        """fp32 logits of tokens [B, S], any B, any S up to the context length."""
        return self.logits(self.params, tokens)

    def logits(self, params: dict[str, jax.Array], tokens: ArrayLike) -> Float[Array, "B S V"]:
        """Logits of params for tokens [B, S]."""
        return self._forward(params, self.checked(np.asarray(tokens)))[..., : self.config.model.vocab]

    def checked(self, tokens: np.ndarray) -> Int32[np.ndarray, "B S"]:
        """Tokens that the model can read. Raises UserError for others."""
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

    # Text

    def generate(self, prompt: str | list[str], max_tokens: int = 200, **how: Any) -> str | list[str]:
        """The text that the model writes after a prompt, or after each of several. The same seed, the same text.

        how: temperature (0.8), top_k, top_p, repetition_penalty and seed, as of inference.sampling.Sampling; stop:
        texts before which it ends.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        rounds = list(self._write(prompts, max_tokens, **how))
        texts = ["".join(pieces) for pieces in zip(*rounds, strict=True)]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(self, prompt: str, max_tokens: int = 200, **how: Any) -> Iterator[str]:
        """What generate returns, piece by piece as it is written."""
        return (pieces[0] for pieces in self._write([prompt], max_tokens, **how))

    def _write(
        self, prompts: Sequence[str], max_tokens: int, stop: Sequence[str] = (), **how: Any
    ) -> Iterator[list[str]]:
        sampling, seq = Sampling(**how), self.config.model.seq
        if self.tokenizer is None:
            raise UserError("the model has no tokenizer, which a text needs; put its tokenizer.json beside it")
        require(len(prompts) > 0, "prompts", list(prompts), "must be one at least")
        require(max_tokens >= 1, "--tokens", max_tokens, "must be at least 1")
        require(not isinstance(stop, str) and all(stop), "stop", stop, "must be a list of texts, none of them empty")
        encoded = [self.tokenizer.encode(text).tolist() for text in prompts]
        for text, ids in zip(prompts, encoded, strict=True):
            require(len(ids) > 0, "--prompt", repr(text), "must have at least one token")
            fits = len(ids) <= seq
            require(fits, "--prompt", f"of {len(ids)} tokens", f"is longer than the context of {seq}", "shorten it")
        ends = beside.ends(self.beside, self.tokenizer)
        writing = self.program.decoding(self.params)
        return write(writing, self.tokenizer, encoded, seq, max_tokens, sampling, stop, ends)

    def export(self, out: str | Path, dtype: str = "fp32") -> None:
        """Writes a folder that transformers and others load. dtype: "fp32", which loses nothing, or "bf16".

        Raises UserError where no architecture of theirs has this model, or where something is there already.
        """
        model = self.config.model
        export(Path(out), model, self.params, self.program.in_order, self.tokenizer, self.beside, dtype)

    # Layouts

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
    """Opens a run's last whole checkpoint, a Hugging Face folder or a GGUF file on any mesh ("tensor=2"; empty: one
    device).

    Raises UserError where it is none of them, has no weights or not those of its configuration, or the mesh does not
    fit.
    """
    trained = open_trained(Path(run), mesh or "data=1", Console())
    return Run(trained.config, trained.program, trained.params, trained.tokenizer, trained.step, trained.beside)
