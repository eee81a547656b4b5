"""A trained run, or a model of somebody else's, opened: the sharded model, called, read and made to write."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, Int32

from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.config_file import check_types
from jaxgpt.data import Tokenizer
from jaxgpt.errors import UserError, require
from jaxgpt.inference.sampling import Sampling
from jaxgpt.inference.text import write
from jaxgpt.interop import beside
from jaxgpt.interop.export import export
from jaxgpt.model.module import GPT, ArrayLike
from jaxgpt.model.parameters import parameter_count
from jaxgpt.model.replaced import Replaced
from jaxgpt.sharding.drawing import Drawing, draw, html_table, plain_rows
from jaxgpt.sharding.mesh import format_mesh
from jaxgpt.training import capture, derived, fitting
from jaxgpt.training.console import Console
from jaxgpt.training.opened import Trained, open_new, open_trained
from jaxgpt.training.program import Program


@dataclass(eq=False, repr=False)
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
    losses: list[float] = field(default_factory=list)
    """Of the steps that fit has trained, nats a token."""
    _captures: list[dict[str, jax.Array | None]] = field(default_factory=list)

    def __repr__(self) -> str:
        model = self.config.model
        mesh = format_mesh(self.program.sizes) if self.program.mesh.size > 1 else "one device"
        shape = f"{model.layers} layers of width {model.width}, vocabulary {model.vocab}"
        return f"Run: {parameter_count(model):,} parameters, {shape}; step {self.step}; {mesh}"

    @cached_property
    def model(self) -> GPT:
        """The model as an NNX module; model(tokens [B, S]) -> fp32 logits [B, S, vocabulary]."""
        return GPT(self.config.model, self.params, self.logits)

    def __call__(self, tokens: ArrayLike) -> Float[Array, "B S V"]:
        """fp32 logits of tokens [B, S], any B, any S up to the context length."""
        for activations in self._captures:
            for name in activations:
                activations[name] = self._activation(name, self.checked(_array(tokens)))
        return self.logits(self.params, tokens)

    def logits(self, params: dict[str, jax.Array], tokens: ArrayLike) -> Float[Array, "B S V"]:
        """Logits of params for tokens [B, S]."""
        whole = self.program.whole_logits(params, self.checked(_array(tokens)))
        return whole[..., : self.config.model.vocab]

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

    # Research

    def replace(self, **functions: Any) -> "Run":
        """This model with functions of your own in the place of its own, on the same parameters.

            run.replace(attention=lambda q, k, v: v).fit("text.txt")

        functions: attention, activation, mlp and norm, as model.replaced.Replaced says; written for one device, they
        work on every mesh, in calls, gradients, captures and fit. A text is written with them, too; with an attention
        of one's own without a cache, each token reading the whole text.
        """
        known = [each.name for each in dataclasses.fields(Replaced)]
        for name, function in functions.items():
            require(name in known, name, function, f"cannot be replaced; known are {', '.join(known)}")
            require(callable(function), name, function, "must be a function")
        own = dataclasses.replace(self.program.replaced, **functions)
        program = Program(self.config, self.program.mesh, own)
        return Run(self.config, program, self.params, self.tokenizer, self.step, self.beside)

    def value_and_grad(self, batch: ArrayLike | Mapping[str, ArrayLike]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mean loss over the tokens of a batch, and the gradient of every parameter, laid out as the parameter is.

        batch: tokens [B, S + 1], each but the first of a row to be predicted; or {"inputs": [B, S], "targets": [B, S]},
        where a target of -1 is not counted. Dropout, where the model has it, is that of the step to come.
        """
        if isinstance(batch, Mapping):
            both = {"inputs", "targets"} <= batch.keys()
            require(both, "batch", sorted(batch), "must have both inputs and targets")
            inputs, targets = _array(batch["inputs"]), _array(batch["targets"])
        else:
            inputs, targets = _array(batch)[..., :-1], _array(batch)[..., 1:]
        require(targets.shape == inputs.shape, "targets", targets.shape, f"must be of the inputs' shape {inputs.shape}")
        self.checked(np.maximum(targets, 0))
        rows, columns = -len(inputs) % self.program.micro_batch, -inputs.shape[1] % self.program.divisors[1]
        around = ((0, rows), (0, columns))
        padded = {
            "inputs": np.pad(self.checked(inputs), around),
            "targets": np.pad(targets.astype(np.int32), around, constant_values=-1),
        }
        loss, gradients, _ = self.program.gradients(self.params, self.program.place(padded), np.int32(self.step))
        return loss, gradients

    @contextmanager
    def capture(self, *names: str) -> Iterator[dict[str, jax.Array | None]]:
        """Within it, run(tokens) leaves the activations of these names in the dictionary that it gives: [B, S, width],
        as they lie on the mesh; rows and columns up to what the mesh divides them by are added.

        names: "blocks.3.attention" and "blocks.3.mlp", what they add to the residual stream; "blocks.3", the block's
        output.
        """
        for name in names:
            capture.site(name, self.config.model.layers)
        activations: dict[str, jax.Array | None] = dict.fromkeys(names)
        self._captures.append(activations)
        try:
            yield activations
        finally:
            self._captures.pop()

    @cached_property
    def _captured(self) -> Callable[..., Callable[..., jax.Array]]:
        """The program of each site, made once."""
        return cache(partial(capture.captured, self.program.step_of, self.program.mesh))

    def _activation(self, name: str, tokens: np.ndarray) -> jax.Array:
        program = self.program
        padded = program.padded(tokens)
        wanted = capture.site(name, self.config.model.layers)
        found = self._captured(wanted)(self.params, program.place_tokens(padded))
        if program.layout.sequence is None:
            return found
        return capture.in_text_order(found, program.sequence_order(padded.shape[1]))

    def fit(
        self,
        data: str,
        steps: int = 100,
        quiet: bool = False,
        optimizer: optax.GradientTransformation | None = None,
        **fields: Any,
    ) -> "Run":
        """Trains on from here, on a text, and returns this run; see training.fitting.fit. `losses` has each step's.

        optimizer: any of optax, or one of your own, in the place of AdamW, its schedule and clipping. fields: of
        RunConfig, such as lr=1e-4 or global_batch=8. Nothing is written to the disk.
        """
        fitted = fitting.fit(self.program, self.params, self._spoken, data, steps, quiet, optimizer, **fields)
        self.params, self.step = fitted.params, self.step + steps
        self.losses += fitted.losses
        self.__dict__.pop("model", None)  # made anew, of the new parameters
        return self

    # Text

    @property
    def _spoken(self) -> Tokenizer:
        """The tokenizer. Raises UserError where there is none."""
        if self.tokenizer is None:
            raise UserError("the model has no tokenizer, which a text needs; put its tokenizer.json beside it")
        return self.tokenizer

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
        seq = self.config.model.seq
        spoken = isinstance(prompts, Sequence) and all(isinstance(text, str) for text in prompts)
        require(spoken, "prompt", prompts, "must be a text or a list of texts")
        require(len(prompts) > 0, "prompts", list(prompts), "must be one at least")
        encoded = [self._spoken.encode(text).tolist() for text in prompts]
        for text, ids in zip(prompts, encoded, strict=True):
            require(len(ids) > 0, "--prompt", repr(text), "must have at least one token")
            fits = len(ids) <= seq
            require(fits, "--prompt", f"of {len(ids)} tokens", f"is longer than the context of {seq}", "shorten it")
        return self.follow(encoded, max_tokens, stop, **how)

    def follow(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str] = (), **how: Any
    ) -> Iterator[list[str]]:
        """What generate writes after prompts in tokens, in rounds of a piece of text for each; of a prompt that is
        longer than the context the end is seen."""
        known = [each.name for each in dataclasses.fields(Sampling)]
        for name, value in how.items():
            require(name in known, name, value, f"does not say how to write; known are {', '.join(known)}")
        sampling = Sampling(**how)
        whole = isinstance(max_tokens, Integral)
        require(whole and max_tokens >= 1, "--tokens", max_tokens, "must be at least 1, and a whole number")
        listed = isinstance(stop, Sequence) and not isinstance(stop, str)
        good = listed and all(isinstance(text, str) and text for text in stop)
        require(good, "stop", stop, "must be a list of texts, none of them empty")
        ends = beside.ends(self.beside, self._spoken)
        seq, writing = self.config.model.seq, self.program.decoding(self.params)
        return write(writing, self._spoken, prompts, seq, int(max_tokens), sampling, stop, ends)

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

    def sbp(self) -> Drawing:
        """Every parameter as it lies on the devices: in colours in a notebook."""
        table = self.program.table
        rows = [draw(name, array, table[name].dims) for name, array in self.params.items()]
        return Drawing(self.program.sizes, rows)


@dataclass(frozen=True)
class Layouts:
    """A table of (parameter, shape, layout) that prints itself."""

    rows: Sequence[Sequence[object]]

    def __repr__(self) -> str:
        return "\n".join(plain_rows(self.rows))

    def _repr_html_(self) -> str:
        return html_table(self.rows)


def _array(tokens: ArrayLike) -> np.ndarray:
    try:
        return np.asarray(tokens)
    except ValueError:
        raise UserError("tokens: rows must be of one length; fill short ones, with targets of -1 there") from None


def load(run: str | Path, mesh: str = "", step: str | int = "last") -> Run:
    """Opens a run's last whole checkpoint, a Hugging Face folder or a GGUF file on any mesh ("tensor=2"; empty: one
    device). step: another checkpoint of the run, by its number, or "best", the one with the least validation loss.

    Raises UserError where it is none of them, has no weights or not those of its configuration, or the mesh does not
    fit.
    """
    require(isinstance(mesh, str), "mesh", mesh, 'must be a text such as "data=2,tensor=2"')
    return _run(open_trained(Path(run), mesh or "data=1", Console(), str(step)))


def start(config: RunConfig) -> Run:
    """A model as a run of this configuration begins, on its mesh (empty: all devices on data): drawn, not trained.

    Raises UserError where the mesh does not fit. A tokenizer that is made from data is left out; bytes is not.
    """
    check_types(RunConfig, vars(config))
    check_types(ModelConfig, vars(config.model))
    return _run(open_new(config, Console()))


def _run(trained: Trained) -> Run:
    return Run(trained.config, trained.program, trained.params, trained.tokenizer, trained.step, trained.beside)
