"""What each verb of the command line takes, and how flags change a configuration."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from tyro.conf import Positional, arg

from jaxgpt.arguments import nearest
from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.errors import UserError, require

MODEL_FLAGS = ("layers", "width", "heads", "kv_heads", "vocab", "seq", "dropout", "attention_dropout")
"""Fields of ModelConfig that have a flag; every field of RunConfig has one."""


Run = Annotated[Positional[Path], arg(metavar="RUN")]
F = TypeVar("F", bound="TrainFlags")


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """Trains a GPT on any mesh of devices, or resumes a run. After SIGINT, SIGTERM, SIGUSR1 or SIGUSR2 it is saved, and
    the exit status is 75: the same command goes on. A second signal ends it at once."""

    preset: str = "demo"
    """A named model and run (a name that is none lists all), or a .json file with a configuration. The defaults below
    are its own."""
    run: Path | None = None
    """Folder of the run; if it exists, the run is resumed with its own configuration. Default: a new one in runs/."""
    plan: Path | None = None
    """A plan that jaxgpt plan --save wrote: its mesh and all that it chose; without --preset its model, too."""
    data: str
    """A file, folder or pattern of text, JSONL or Parquet (PATH#FIELD), Megatron's files, a prepared folder, stdlib;
    or several with weights: 0.7:a.jsonl,0.3:b/"""
    tokenizer: str
    """bytes, chars, bpe (trained from the data to --vocab entries), a tokenizer.json, or a folder with GPT-2's
    encoder.json and vocab.bpe."""
    init_from: str
    """A Hugging Face folder or a GGUF file to train on from; it gives the model, and the tokenizer where none is named.
    Empty: parameters are drawn."""
    validation: float
    """Share of the tokens, at the end, kept for validation."""
    documents: Literal["joined", "masked", "separate"]
    """Where a document ends inside of a sample: the next one's first token is predicted; or masked in the loss; or
    that, and attention and positions begin anew, so that no document sees another."""
    mesh: str
    """Axes and sizes, such as data=2,fsdp=2,tensor=2; one may be -1; empty: all devices on data; auto (train alone):
    the fastest plan for the devices that are here."""
    steps: int
    """Optimizer steps."""
    seed: int
    """Of parameters, order and dropout."""
    global_batch: int
    """Sequences a step."""
    micro_batch: int | None
    """Sequences a device runs at once; None: all of its share, or over pipe as few as keep the stages busy."""
    seq: int
    """Context length in tokens."""
    layers: int
    """Transformer blocks."""
    width: int
    """Width of the residual stream; those of heads and feed-forward layer follow it."""
    heads: int
    """Query heads."""
    kv_heads: int | None
    """Key-value heads; None: as many as query heads; they keep their share where only --heads is given."""
    vocab: int
    """Entries of the vocabulary; where --tokenizer has its own, that size is taken."""
    dropout: float
    """On the embedding and on what each block adds to the residual stream."""
    attention_dropout: float
    """Only 0 is allowed: the attention kernels have none."""
    lr: float
    """Learning rate after warm-up."""
    min_lr: float
    """Learning rate at the end; it keeps its share of --lr where only that is given."""
    warmup: int
    """Steps of linear warm-up."""
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"]
    """How the learning rate falls."""
    decay: float
    """Share of the steps, at the end, in which wsd falls."""
    weight_decay: float
    """On matrices alone."""
    beta1: float
    """AdamW's."""
    beta2: float
    """AdamW's."""
    epsilon: float
    """AdamW's."""
    clip: float
    """Largest global norm of the gradient; 0: no clipping."""
    layout: str
    """Rows of the layout table changed by hand, such as mlp=none,embed=fsdp+data."""
    sequence_parallel: bool
    """Split norms, dropout and residual stream over tensor along the sequence."""
    context_attention: Literal["auto", "ring", "gather"]
    """Over context, keys and values pass round a ring, or are gathered at once; auto: ring, and gather over pipe."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]
    """Over pipe, in which order a stage runs its microbatches forward and backward."""
    schedule_file: str
    """A text file with a schedule of your own in place of --schedule: one line a tick, such as F1 F0 | . B0."""
    virtual_stages: int
    """Parts of the model on each stage; more than 1 for the interleaved schedule."""
    stages: str
    """Layers of each part, such as 7,8,8,7; auto: as even as can be."""
    zero: Literal[0, 1, 2, 3]
    """Split over data: 1 optimizer state, 2 gradients too, 3 weights too."""
    recompute: str
    """What the backward pass computes again rather than keeps: none, selective or full; or such as full:12, by the
    first 12 layers of each stage (of a virtual stage, where there are some) alone."""
    offload: Literal["none", "optimizer"]
    """What lies in the host's memory rather than the device's: with optimizer, fp32 masters and Adam's moments."""
    dtype: Literal["auto", "bf16", "fp32"]
    """Type of computation; auto: bf16 on GPU, fp32 on CPU."""
    log_every: int
    """Steps between lines of progress."""
    eval_every: int
    """Steps between validations; 0: only at the end, over all tokens. Checkpoints of other steps are never the best."""
    eval_tokens: int
    """Most validation tokens read during training; the last validation reads them all."""
    save_every: int
    """Steps between checkpoints."""
    keep: int
    """The last checkpoints that are kept; the one with the least validation loss is kept as well."""
    keep_every: int
    """Steps between checkpoints that are kept for good; 0: none is."""
    resume: Literal["auto", "strict"]
    """Where the last checkpoint is damaged: take the one before it, or refuse."""
    non_finite: str
    """Where loss or gradient are not finite, the step is undone, and what is wrong is named; then skip:N leaves its
    samples out, at most N steps in a row, stop ends the run, rewind:N goes back to the last checkpoint and on with the
    samples after it, at most N times."""
    spike: float
    """A loss above this many times the median of the last readings rewinds the run likewise; 0: none does."""
    watchdog: float
    """A step that takes this many times the median, and over five minutes, ends the process with status 69 and the
    stacks of its threads; 0: none does."""
    profile: str
    """Steps to trace, such as 10:13."""
    prompt: str
    """Start of the sample drawn at the end."""


@dataclass(frozen=True, kw_only=True)
class LaunchFlags(TrainFlags):
    """Trains a GPT on any mesh of devices, or resumes a run. Under srun, mpirun or in a Kubernetes Job, processes find
    each other; started by hand, each is given --coordinator, --processes and --process. After SIGINT, SIGTERM, SIGUSR1
    or SIGUSR2 the run is saved, and the exit status is 75: the same command goes on. A second signal ends at once."""

    coordinator: str | None = None
    """HOST:PORT of process 0, the same for all processes."""
    processes: int | None = None
    """How many there are; 1: this one is alone, whatever has started it."""
    process: int | None = None
    """Number of this one, from 0."""


@dataclass(frozen=True, kw_only=True)
class ExplainFlags(TrainFlags):
    """Says where every array of a configuration lies on a mesh, what is kept and what is sent. Needs no devices."""

    compiled: Literal["cpu", "a100", "h100", "h200", "b200"] | None = None
    """Compile the step, too, for CPU or for GPUs that need not be there, and compare."""
    json: bool = False
    """Print JSON in place of tables."""
    picture: Path | None = None
    """Draw the pipeline's schedule into this PNG file, which must not exist."""


@dataclass(frozen=True, kw_only=True)
class PlanFlags(TrainFlags):
    """Ranks the plans of a model on hardware that need not be there: what each costs in time and memory, and why.

    What is given of --mesh, --micro-batch, --schedule, --virtual-stages, --zero, --recompute, --sequence-parallel and
    --offload is kept; the rest is searched for.
    """

    preset: str = "gpt3-125m"
    """A named model, or a .json file with a configuration; a shape alone (--layers, --width, ...) changes GPT-3's."""
    devices: int | None = None
    """How many to plan for; None: those of --mesh, or those that are here."""
    hardware: str | None = None
    """A kind of device by name (v100-16gb, a100-40gb, a100-80gb, h100, h200, b200, cpu), or a file that describes one,
    in the form of jaxgpt/planner/hardware.toml; None: the one that is here."""
    calibrate: bool = False
    """Measure the devices that are here first, rather than go by the table."""
    tokens: float | None = None
    """Tokens of the whole training, for its days; None: as many as --steps take."""
    top: int = 5
    """Plans told, the fastest first."""
    json: bool = False
    """Print JSON in place of tables."""
    picture: Path | None = None
    """Draw memory and time of the plans into this PNG file, which must not exist."""
    save: Path | None = None
    """Write the first plan into this file, which must not exist, for train --plan."""
    verify: bool = False
    """Compile the first plan's train step for the absent devices, and put what the compiler says in place of what was
    predicted; exits with 1 where it does not fit."""


@dataclass(frozen=True, kw_only=True)
class EvalFlags:
    """Loss, perplexity, bits per byte and tokens counted of a trained run or of a model."""

    run: Run
    """Folder of the run, a Hugging Face folder, or a GGUF file."""
    data: str | None = None
    """Text to read, in full; None: the run's own validation part."""
    mesh: str = ""
    """Axes and sizes; empty: all devices on data. Any mesh opens any run."""
    step: str = "last"
    """The run's checkpoint: a step, last, or best, the one with the least validation loss."""
    stride: int | None = None
    """Tokens that a window of the context's length moves on, so that each token is predicted with at least the
    context's length less so many before it; None: windows that do not overlap."""


@dataclass(frozen=True, kw_only=True)
class SampleFlags:
    """Text that a trained run or a model writes after a prompt."""

    run: Run
    """Folder of the run, a Hugging Face folder, or a GGUF file."""
    prompt: str | None = None
    """Start of the text; None: the run's own."""
    tokens: int = 200
    """Tokens to write."""
    temperature: float = 0.8
    """0: always the likeliest token."""
    top_k: int = 0
    """Draw among the k likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this share of the probability."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that the text has already become less likely."""
    stop: str | None = None
    """End before this text."""
    seed: int = 0
    """The same seed writes the same text."""
    mesh: str = ""
    """Axes and sizes; empty: one device. Any mesh opens any run."""
    step: str = "last"
    """The run's checkpoint: a step, last, or best, the one with the least validation loss."""


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    """Writes a run or a model as a Hugging Face folder: config.json, safetensors, tokenizer, generation_config.json."""

    run: Run
    """Folder of the run, a Hugging Face folder, or a GGUF file."""
    out: Annotated[Positional[Path], arg(metavar="OUT")]
    """New or empty folder."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the tensors; fp32 loses nothing."""
    mesh: str = ""
    """Axes and sizes to open it on; empty: one device."""
    step: str = "last"
    """The run's checkpoint: a step, last, or best, the one with the least validation loss."""


def defaults(kind: type[F], base: RunConfig, preset: str, run: Path | None) -> F:
    """The flags that say what `base` says."""
    model = {name: getattr(base.model, name) for name in MODEL_FLAGS}
    top = {f.name: getattr(base, f.name) for f in dataclasses.fields(base) if f.name != "model"}
    return kind(preset=preset, run=run, **top, **model)


def override(base: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """`base` with the fields in `given`, any of RunConfig's or ModelConfig's.

    What a field implies follows it: --width or --heads the head width, --width the feed-forward width (both by
    ModelConfig's rules), --heads the key-value heads (as many queries to each as before), --lr the rate at the end (the
    same share of it as before). Raises UserError.
    """
    of_model, of_run = ({f.name for f in dataclasses.fields(kind)} for kind in (ModelConfig, RunConfig))
    for name in given.keys() - of_model - of_run:
        raise UserError(f"{name}: no such field of a run; {nearest(name, of_model | of_run)}see config.py")
    model = {name: value for name, value in given.items() if name in of_model}
    if {"width", "heads"} & model.keys():
        model.setdefault("head_width", None)
    if "width" in model:
        model.setdefault("mlp_width", None)
    if "heads" in model and "kv_heads" not in model and base.model.kv_heads is not None:
        model["kv_heads"] = _kv_heads(base.model, model["heads"])
    top = {name: value for name, value in given.items() if name in of_run}
    if top.get("lr", base.lr) != base.lr:
        top.setdefault("min_lr", base.min_lr * top["lr"] / base.lr)
    return dataclasses.replace(base, **{"model": dataclasses.replace(base.model, **model), **top})


def _kv_heads(model: ModelConfig, heads: int) -> int:
    group = model.heads // model.kv
    allowed = f"must be a multiple of {group}, the query heads that share a key-value head"
    require(heads % group == 0, "--heads", heads, allowed, f"or give --kv-heads too, such as {gcd(heads, model.kv)}")
    return heads // group
