"""What a user may say: the model, and the run that trains it. Every value is checked here, where it enters."""

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxgpt import recomputation
from jaxgpt.data import blend
from jaxgpt.errors import UserError, require

SMALL_VOCABULARY = 8192


def padded_vocabulary(vocab: int) -> int:
    """Entries held for a vocabulary: a function of its size alone, so that no mesh changes any shape.

    A multiple of 64 up to 8192 entries, else of 512, which `tensor` x `pipe` up to 512 divides.
    """
    multiple = 64 if vocab <= SMALL_VOCABULARY else 512
    return -(-vocab // multiple) * multiple


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequencies stretched for a longer context, in Hugging Face's terms."""

    kind: Literal["linear", "llama3"] = "linear"
    factor: float = 1.0
    """Positions are divided by this (llama3: those of low frequency)."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_seq: int = 8192
    """Context length before scaling (llama3)."""

    def __post_init__(self) -> None:
        require(0 < self.factor < math.inf, "rope_scaling.factor", self.factor, "must be above 0 and finite")
        low, high = self.low_frequency_factor, self.high_frequency_factor
        allowed = f"must be above 0 and below {high}, the high one"
        require(0 < low < high, "rope_scaling.low_frequency_factor", low, allowed)
        require(self.original_seq >= 1, "rope_scaling.original_seq", self.original_seq, "must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer; GPT-2/3 and LLaMA-like models are values of it, not kinds.

    Defaults are GPT-2's choices. Wide enough for what Hugging Face's GPT-2, GPT-NeoX, LLaMA, Mistral and
    Qwen2/3 configurations say.
    """

    layers: int = 4
    width: int = 128
    """Width of the residual stream ("hidden size")."""
    heads: int = 4
    """Query heads."""
    kv_heads: int | None = None
    """Key-value heads; None: as many as query heads."""
    head_width: int | None = None
    """Width of one head; None: width / heads."""
    mlp_width: int | None = None
    """Width of the feed-forward layer; None: 4 x width, gated 8/3 x width rounded up to a multiple of 64."""
    vocab: int = 256
    """Entries of the vocabulary, without padding."""
    seq: int = 64
    """Context length in tokens; the number of learned positions."""
    positions: Literal["learned", "rotary"] = "learned"
    rope_base: float = 10_000.0
    rope_fraction: float = 1.0
    """Share of each head's width that is rotated (GPT-NeoX: 0.25)."""
    rope_scaling: RopeScaling | None = None
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_epsilon: float = 1e-5
    norm_bias: bool = True
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = "gelu_tanh"
    """gelu is the exact one (erf), gelu_tanh GPT-2's approximation."""
    gated: bool = False
    """activation(x W_gate) * (x W_up): SwiGLU with silu."""
    qkv_bias: bool = True
    attention_bias: bool = True
    """A bias on attention's output projection."""
    mlp_bias: bool = True
    qk_norm: bool = False
    """RMSNorm on queries and keys, over each head's width (Qwen3)."""
    parallel_residual: bool = False
    """x + attention(norm1(x)) + mlp(norm2(x)) (GPT-NeoX) in place of one after the other."""
    window: int | None = None
    """Each token sees itself and window - 1 tokens before it (Mistral); None: all before it."""
    tied: bool = True
    """The head is the token embedding."""
    dropout: float = 0.0
    """On the embedding and on what each block adds to the residual stream."""
    attention_dropout: float = 0.0
    """Refused unless 0: the fused attention kernels have none."""
    init_std: float = 0.02

    @property
    def kv(self) -> int:
        """Key-value heads."""
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.head_width if self.head_width is not None else self.width // self.heads

    @property
    def mlp(self) -> int:
        """Width of the feed-forward layer."""
        if self.mlp_width is not None:
            return self.mlp_width
        return -(-8 * self.width // 3 // 64) * 64 if self.gated else 4 * self.width

    @property
    def padded_vocab(self) -> int:
        """Entries held, with padding."""
        return padded_vocabulary(self.vocab)

    @property
    def rotated(self) -> int:
        """Dimensions of a head that are rotated; even."""
        return int(self.head * self.rope_fraction) // 2 * 2

    def __post_init__(self) -> None:
        for flag in ("layers", "width", "heads", "seq", "vocab", "kv_heads", "head_width", "mlp_width", "window"):
            value = getattr(self, flag)
            require(value is None or value >= 1, _flag(flag), value, "must be at least 1")
        require(
            self.head_width is not None or self.width % self.heads == 0,
            "--heads",
            self.heads,
            f"must divide --width {self.width}",
            f"take one of {_divisors(self.width)}",
        )
        require(
            self.heads % self.kv == 0,
            "--kv-heads",
            self.kv,
            f"must divide --heads {self.heads}",
            f"take one of {_divisors(self.heads)}",
        )
        require(0 <= self.dropout < 1, "--dropout", self.dropout, "must be at least 0 and below 1")
        require(
            self.attention_dropout == 0,
            "--attention-dropout",
            self.attention_dropout,
            "only 0 is allowed, since the attention kernels have no dropout",
            "use --dropout, which acts on the embedding and the residual stream",
        )
        for flag in ("rope_base", "norm_epsilon", "init_std"):
            require(0 < getattr(self, flag) < math.inf, flag, getattr(self, flag), "must be above 0 and finite")
        require(0 < self.rope_fraction <= 1, "rope_fraction", self.rope_fraction, "must be above 0 and at most 1")
        require(
            self.positions == "learned" or self.rotated >= 2,
            "rope_fraction",
            self.rope_fraction,
            f"rotates no dimension of a head of {self.head}",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run: a model, its data, and how it is trained on which mesh."""

    model: ModelConfig = ModelConfig()
    data: str = "stdlib"
    """A file, a folder or a pattern of text, JSONL or Parquet, compressed or not; Megatron's files; a prepared folder;
    "stdlib", the Python standard library's own source; or several with weights, "0.7:a.jsonl,0.3:b/"."""
    tokenizer: str = "bpe"
    """bytes, chars, bpe (trained from the data to --vocab entries), a tokenizer.json, or a folder with GPT-2's
    encoder.json and vocab.bpe."""
    init_from: str = ""
    """A Hugging Face folder or a GGUF file whose model is trained on; empty: parameters are drawn."""
    validation: float = 0.05
    """Share of the tokens, at the end, that is kept for validation."""
    documents: Literal["joined", "masked", "separate"] = "joined"
    """Where a document ends inside of a sample: the next one's first token is predicted; or no target; or that, and
    attention and positions begin anew."""
    mesh: str = ""
    """Axes and sizes, "data=2,fsdp=2,tensor=2"; one may be -1; empty: all devices on data."""
    steps: int = 300
    seed: int = 0
    global_batch: int = 16
    """Sequences a step."""
    micro_batch: int | None = None
    """Sequences a device runs at once; None: all of its share, or over pipe as few as keep the stages busy."""
    lr: float = 1e-3
    min_lr: float = 1e-4
    """Learning rate at the end."""
    warmup: int = 20
    """Steps of linear warm-up."""
    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    decay: float = 0.2
    """Share of the steps, at the end, in which wsd falls."""
    weight_decay: float = 0.1
    """On matrices alone."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip: float = 1.0
    """Largest global norm of the gradient; 0: no clipping."""
    layout: str = ""
    """Rows of the layout table changed by hand, "mlp=none,embed=fsdp+data"."""
    sequence_parallel: bool = False
    """Split the residual stream's sequence over tensor as well: norms, dropout and what they keep."""
    context_attention: Literal["auto", "ring", "gather"] = "auto"
    """Over context, keys and values pass round a ring, or are gathered at once: faster on few devices, and fuller.
    auto: ring, and gather in a pipeline."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    """Over pipe, in which order a stage runs its microbatches forward and backward."""
    schedule_file: str = ""
    """A file with a table of the user's own in place of `schedule` (pipeline.schedule_file says how it is written)."""
    virtual_stages: int = 1
    """Parts of the model on each stage; more than 1 for the interleaved schedule."""
    stages: str = "auto"
    """Layers of each part, "7,8,8,7"; auto: as even as can be."""
    zero: Literal[0, 1, 2, 3] = 0
    """What is split over data beside the batch: 1 optimizer state and masters, 2 gradients too, 3 weights too."""
    recompute: str = "none"
    """What the backward computes again: none, selective, full; or "full:12", by the first 12 layers of each stage."""
    offload: Literal["none", "optimizer"] = "none"
    """What lies in the host's memory: with optimizer the masters and Adam's moments."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of computation; masters are always fp32. auto: bf16 on GPU, fp32 on CPU."""
    log_every: int = 10
    eval_every: int = 100
    """Steps between validations; 0: only at the end."""
    eval_tokens: int = 65_536
    """Most validation tokens read during training; the last validation reads them all."""
    save_every: int = 100
    keep: int = 3
    """The last checkpoints that are kept; the one with the least validation loss is kept as well."""
    keep_every: int = 0
    """Steps between checkpoints that are kept for good; 0: none is."""
    resume: Literal["auto", "strict"] = "auto"
    """Where the last checkpoint is damaged, auto takes the one before it, and strict refuses."""
    non_finite: str = "skip:10"
    """What becomes of a run when loss or gradient of a step are not finite, and the step is undone: "skip:10", its
    samples are left out, at most ten steps in a row; "stop"; "rewind:3", back to the last checkpoint and on with the
    samples after it, at most three times from one checkpoint."""
    spike: float = 0.0
    """A loss above this many times the median of the last readings rewinds the run likewise; 0: none does."""
    watchdog: float = 20.0
    """A step that takes this many times the median, and over five minutes, ends the process; 0: none does."""
    profile: str = ""
    """Steps to trace, "10:13"."""
    prompt: str = "def "
    """Start of the sample drawn at the end."""

    def __post_init__(self) -> None:
        for flag in ("steps", "global_batch", "micro_batch", "log_every", "keep", "virtual_stages"):
            value = getattr(self, flag)
            require(value is None or value >= 1, _flag(flag), value, "must be at least 1")
        for flag in ("lr", "epsilon"):  # before --min-lr, which follows --lr
            value = getattr(self, flag)
            require(0 < value < math.inf, _flag(flag), value, "must be above 0 and finite")
        counts = ("seed", "warmup", "eval_every", "save_every", "keep_every", "eval_tokens")
        for flag in (*counts, "clip", "weight_decay", "min_lr"):
            require(getattr(self, flag) >= 0, _flag(flag), getattr(self, flag), "must be at least 0")
        for flag in ("beta1", "beta2"):
            require(0 <= getattr(self, flag) < 1, _flag(flag), getattr(self, flag), "must be at least 0 and below 1")
        falls = self.lr_schedule != "constant"
        allowed = f"must be at most --lr {self.lr}, from which the learning rate falls to it"
        require(not falls or self.min_lr <= self.lr, "--min-lr", self.min_lr, allowed, "or give --lr-schedule constant")
        met = self.save_every == 0 or self.keep_every % self.save_every == 0
        require(met, "--keep-every", self.keep_every, f"must be a multiple of --save-every {self.save_every}")
        blend.parse(self.data)
        recomputation.check(self.recompute, self.model.layers)
        require(0 < self.validation < 1, "--validation", self.validation, "must be above 0 and below 1")
        require(0 < self.decay <= 1, "--decay", self.decay, "must be above 0 and at most 1")
        require(self.seed < 2**32, "--seed", self.seed, "must be below 2**32")
        for flag in ("spike", "watchdog"):
            value = getattr(self, flag)
            require(value == 0 or 1 < value < math.inf, _flag(flag), value, "must be above 1 and finite, or 0 for none")
        self.profile_steps()
        self.after_non_finite()

    def profile_steps(self) -> tuple[int, int] | None:
        """First step traced and the one after the last, or None."""
        if not self.profile:
            return None
        first, _, last = self.profile.partition(":")
        good = first.isdecimal() and last.isdecimal() and int(first) < int(last)
        require(good, "--profile", self.profile, 'must be "first:last" with first < last', "for example 10:13")
        return int(first), int(last)

    def after_non_finite(self) -> tuple[Literal["skip", "stop", "rewind"], int]:
        """What non_finite says, and how many times at most."""
        what, colon, times = self.non_finite.partition(":")
        if what == "stop" and not colon:
            return "stop", 0
        good = what in ("skip", "rewind") and times.isdecimal() and int(times) >= 1
        require(good, "--non-finite", self.non_finite, "must be skip:N, rewind:N or stop", "for example skip:10")
        return ("skip" if what == "skip" else "rewind"), int(times)


UNCUT: dict[str, Any] = {"schedule": "1f1b", "schedule_file": "", "virtual_stages": 1, "stages": "auto"}
"""How a pipeline is cut, where nobody says it: that is of a mesh, not of a run, so another mesh begins with this."""


def uncut(given: Collection[str]) -> dict[str, Any]:
    """UNCUT, without the fields that were given."""
    return {name: value for name, value in UNCUT.items() if name not in given}


def to_json(config: RunConfig) -> str:
    """The configuration as JSON, every field named."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, name: str) -> RunConfig:
    """Reads what to_json wrote. Raises UserError, naming the file, where it is not a configuration."""
    try:
        fields = json.loads(text)
        fields["model"] = _model(fields["model"])
        check_types(RunConfig, fields)
        return RunConfig(**fields)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{name}: not a configuration of jaxgpt ({error})") from None


def check_types(kind: type, values: Mapping[str, Any]) -> None:
    """Refuses a value that is not of its field's type: a file can say what a flag cannot. Raises UserError."""
    hints = get_type_hints(kind)
    for name, value in values.items():
        if name not in hints or dataclasses.is_dataclass(hints[name]) or name == "rope_scaling":
            continue
        hint = hints[name]
        allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not any(_is(value, each) for each in allowed):
            said = " or ".join(_said(each) for each in allowed)
            raise UserError(f"{name} {json.dumps(value, default=str)}: must be {said}")


def _is(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return any(value == each and type(value) is type(each) for each in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is hint


def _said(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(json.dumps(each) for each in get_args(hint))}"
    words = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false", type(None): "null"}
    return words[hint]


def _model(fields: dict[str, Any]) -> ModelConfig:
    scaling = fields.get("rope_scaling")
    check_types(ModelConfig, fields)
    if scaling:
        check_types(RopeScaling, scaling)
    return ModelConfig(**{**fields, "rope_scaling": RopeScaling(**scaling) if scaling else None})


def differences(ours: RunConfig, theirs: RunConfig, ignore: frozenset[str] = frozenset()) -> list[str]:
    """ "field: ours, theirs" of each field that differs, the model's fields by "model.NAME"."""

    def flat(config: RunConfig) -> dict[str, object]:
        top = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "model"}
        return top | {f"model.{f.name}": getattr(config.model, f.name) for f in dataclasses.fields(config.model)}

    a, b = flat(ours), flat(theirs)
    return [f"{name}: {a[name]}, {b[name]}" for name in a if a[name] != b[name] and name not in ignore]
