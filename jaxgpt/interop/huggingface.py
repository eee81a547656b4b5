"""config.json of Hugging Face's models as a ModelConfig, and a ModelConfig as such a file.

Read are the names of transformers before and after its version 5 (rope_theta, or rope_parameters); both are written.
Where a file leaves a field out, transformers' own default for the family is taken.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from jaxgpt.config import ModelConfig, RopeScaling
from jaxgpt.errors import UserError
from jaxgpt.interop.families import HUGGING_FACE, Family

CONFIG = "config.json"
Fields = dict[str, Any]

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
_WRITTEN = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu", "relu": "relu"}
_KNOWN = f"known are {', '.join(HUGGING_FACE)}"


def read_json(file: Path) -> Fields:
    """A file that must hold a JSON object. Raises UserError."""
    try:
        fields = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error}); a model's folder has one") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error}); fetch it again") from None
    if not isinstance(fields, dict):
        raise UserError(f"{file}: not a JSON object; fetch it again")
    return fields


def read_config(file: Path) -> tuple[Family, ModelConfig, Fields]:
    """Family, model and all fields of a config.json. Raises UserError for an architecture or a choice not known."""
    fields = read_json(file)
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in HUGGING_FACE:
        raise UserError(f"{file}: model_type {kind!r} is not an architecture that is read; {_KNOWN}")
    try:
        return HUGGING_FACE[kind], _READERS[kind](_Reader(file, fields)), fields
    except UserError as error:
        raise error if str(error).startswith(str(file)) else UserError(f"{file}: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Reader:
    """The fields of a file, each refused by name where it is not of its type."""

    file: Path
    fields: Fields

    def get(self, kind: type, *names: str, default: Any = None) -> Any:
        """The first of the names that is there and not null; whole numbers are taken for float."""
        for name in names:
            value = self.fields.get(name)
            if value is None:
                continue
            good = isinstance(value, int | float) if kind is float else isinstance(value, kind)
            if not good or (isinstance(value, bool) and kind is not bool):
                raise self.refused(name, value, f"must be of type {kind.__name__}")
            if kind is float and not math.isfinite(value):
                raise self.refused(name, value, "must be finite")
            return float(value) if kind is float else value
        return default

    def refused(self, name: str, value: object, why: str) -> UserError:
        return UserError(f"{self.file}: {name} {value!r}: {why}")

    def refuse(self, name: str, value: object, default: object) -> None:
        """Refuses a field whose value leads to another model than ours."""
        if self.fields.get(name, default) != value:
            raise self.refused(name, self.fields[name], f"only {value!r} is supported")

    def activation(self, name: str, default: str) -> Any:
        found = self.get(str, name, default=default)
        if found not in _ACTIVATIONS:
            raise self.refused(name, found, f"not an activation that is known; known are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[found]

    def rope(self) -> "_Reader":
        """The fields of rotary positions: newer files keep them in rope_parameters, older ones beside the others."""
        found = self.get(dict, "rope_parameters", default={}) | (self.get(dict, "rope_scaling", default={}))
        return _Reader(self.file, {"rope_theta": self.fields.get("rope_theta"), **found})

    def scaling(self) -> RopeScaling | None:
        rope = self.rope()
        kind = rope.get(str, "rope_type", "type", default="default")
        if kind == "default":
            return None
        if kind not in ("linear", "llama3"):
            raise self.refused("rope_type", kind, "not a scaling that is known; known are default, linear, llama3")
        factor = rope.get(float, "factor", default=1.0)
        if kind == "linear":
            return RopeScaling(kind="linear", factor=factor)
        return RopeScaling(
            kind="llama3",
            factor=factor,
            low_frequency_factor=rope.get(float, "low_freq_factor", default=1.0),
            high_frequency_factor=rope.get(float, "high_freq_factor", default=4.0),
            original_seq=rope.get(int, "original_max_position_embeddings", default=8192),
        )

    def window(self, default: int | None) -> int | None:
        """Sliding attention, where all layers have it or none."""
        if self.fields["model_type"] == "mistral":
            return self.get(int, "sliding_window") if "sliding_window" in self.fields else default
        layers = self.get(int, "num_hidden_layers", default=32)
        size = self.get(int, "sliding_window", default=default)
        first = self.get(int, "max_window_layers", default=28)
        sliding = [self.get(bool, "use_sliding_window", default=False) and i >= first for i in range(layers)]
        if given := self.get(list, "layer_types"):
            sliding = [each == "sliding_attention" for each in given]
        if len(set(sliding)) > 1:
            raise self.refused("layer_types", "mixed", "layers of two kinds of attention are not supported")
        return size if any(sliding) else None


def _gpt2(r: _Reader) -> ModelConfig:
    r.refuse("scale_attn_weights", True, True)
    r.refuse("scale_attn_by_inverse_layer_idx", False, False)
    r.refuse("add_cross_attention", False, False)
    return ModelConfig(
        layers=r.get(int, "n_layer", default=12),
        width=r.get(int, "n_embd", default=768),
        heads=r.get(int, "n_head", default=12),
        mlp_width=r.get(int, "n_inner"),
        vocab=r.get(int, "vocab_size", default=50257),
        seq=r.get(int, "n_positions", "n_ctx", default=1024),
        norm_epsilon=r.get(float, "layer_norm_epsilon", default=1e-5),
        activation=r.activation("activation_function", "gelu_new"),
        dropout=r.get(float, "resid_pdrop", default=0.1),
        init_std=r.get(float, "initializer_range", default=0.02),
        tied=r.get(bool, "tie_word_embeddings", default=True),
    )


def _neox(r: _Reader) -> ModelConfig:
    rope, biased = r.rope(), r.get(bool, "attention_bias", default=True)
    return ModelConfig(
        layers=r.get(int, "num_hidden_layers", default=44),
        width=r.get(int, "hidden_size", default=6144),
        heads=r.get(int, "num_attention_heads", default=64),
        mlp_width=r.get(int, "intermediate_size", default=24576),
        vocab=r.get(int, "vocab_size", default=50432),
        seq=r.get(int, "max_position_embeddings", default=2048),
        positions="rotary",
        rope_base=rope.get(float, "rope_theta", default=r.get(float, "rotary_emb_base", default=10_000.0)),
        rope_fraction=rope.get(float, "partial_rotary_factor", default=r.get(float, "rotary_pct", default=0.25)),
        rope_scaling=r.scaling(),
        norm_epsilon=r.get(float, "layer_norm_eps", default=1e-5),
        activation=r.activation("hidden_act", "gelu"),
        qkv_bias=biased,
        attention_bias=biased,
        parallel_residual=r.get(bool, "use_parallel_residual", default=True),
        dropout=r.get(float, "hidden_dropout", default=0.0),
        init_std=r.get(float, "initializer_range", default=0.02),
        tied=r.get(bool, "tie_word_embeddings", default=False),
    )


def _llama_like(r: _Reader, **choices: Any) -> ModelConfig:
    """LLaMA's fields; choices: what a family fixes, and its defaults where they are not LLaMA's."""
    heads = r.get(int, "num_attention_heads", default=32)
    rest: dict[str, Any] = {"head_width": r.get(int, "head_dim"), "window": None, "qk_norm": False, "mlp_bias": False}
    return ModelConfig(
        layers=r.get(int, "num_hidden_layers", default=32),
        width=r.get(int, "hidden_size", default=4096),
        heads=heads,
        kv_heads=r.get(int, "num_key_value_heads", default=choices.pop("kv_heads", heads)),
        mlp_width=r.get(int, "intermediate_size", default=choices.pop("mlp_width", 11008)),
        vocab=r.get(int, "vocab_size", default=choices.pop("vocab", 32000)),
        seq=r.get(int, "max_position_embeddings", default=choices.pop("seq", 2048)),
        positions="rotary",
        rope_base=r.rope().get(float, "rope_theta", default=10_000.0),
        rope_scaling=r.scaling(),
        norm="rmsnorm",
        norm_bias=False,
        norm_epsilon=r.get(float, "rms_norm_eps", default=1e-6),
        activation=r.activation("hidden_act", "silu"),
        gated=True,
        init_std=r.get(float, "initializer_range", default=0.02),
        tied=r.get(bool, "tie_word_embeddings", default=False),
        **(rest | choices),
    )


def _llama(r: _Reader) -> ModelConfig:
    biased = r.get(bool, "attention_bias", default=False)
    mlp_bias = r.get(bool, "mlp_bias", default=False)
    return _llama_like(r, qkv_bias=biased, attention_bias=biased, mlp_bias=mlp_bias)


def _mistral(r: _Reader) -> ModelConfig:
    own = {"kv_heads": 8, "mlp_width": 14336, "seq": 131072}
    return _llama_like(r, qkv_bias=False, attention_bias=False, window=r.window(4096), **own)


def _qwen(r: _Reader, **choices: Any) -> ModelConfig:
    own = {"kv_heads": 32, "mlp_width": 22016, "vocab": 151936, "seq": 32768}
    return _llama_like(r, window=r.window(4096), **(own | choices))


def _qwen2(r: _Reader) -> ModelConfig:
    return _qwen(r, qkv_bias=True, attention_bias=False)


def _qwen3(r: _Reader) -> ModelConfig:
    biased = r.get(bool, "attention_bias", default=False)
    head = r.get(int, "head_dim", default=128)
    return _qwen(r, qkv_bias=biased, attention_bias=biased, qk_norm=True, head_width=head)


_READERS = {
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def family_of(model: ModelConfig) -> Family:
    """The family of transformers that has this model. Raises UserError where none has."""
    biases = (model.qkv_bias, model.attention_bias, model.mlp_bias)
    plain = model.norm == "layernorm" and model.norm_bias and not model.gated and not model.qk_norm
    plain = plain and model.kv == model.heads and model.head * model.heads == model.width and model.mlp_bias
    plain = plain and model.window is None
    if plain and model.positions == "learned" and all(biases) and not model.parallel_residual:
        return HUGGING_FACE["gpt2"]
    if plain and model.positions == "rotary" and model.qkv_bias == model.attention_bias:
        return HUGGING_FACE["gpt_neox"]
    modern = model.positions == "rotary" and model.norm == "rmsnorm" and not model.norm_bias and model.gated
    if modern and model.rope_fraction == 1 and not model.parallel_residual and model.dropout == 0:
        alike = model.qkv_bias == model.attention_bias
        if model.qk_norm and alike and not model.mlp_bias:
            return HUGGING_FACE["qwen3"]
        if not model.qk_norm and biases == (True, False, False):
            return HUGGING_FACE["qwen2"]
        if not model.qk_norm and model.window is not None and not any(biases):
            return HUGGING_FACE["mistral"]
        if not model.qk_norm and model.window is None and alike:
            return HUGGING_FACE["llama"]
    raise UserError(f"export: no architecture of transformers that is known has this model's choices; {_KNOWN}")


def to_config(model: ModelConfig, dtype: str) -> Fields:
    """The fields of a config.json. dtype: of the stored tensors, "float32". Raises UserError as family_of does."""
    family = family_of(model)
    common: Fields = {
        "architectures": [family.architecture],
        "model_type": family.kind,
        "dtype": dtype,
        "vocab_size": model.vocab,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
    }
    return common | (_gpt2_fields(model) if family.kind == "gpt2" else _rotary_fields(model, family.kind))


def _gpt2_fields(model: ModelConfig) -> Fields:
    return {
        "n_layer": model.layers,
        "n_embd": model.width,
        "n_head": model.heads,
        "n_inner": model.mlp,
        "n_positions": model.seq,
        "activation_function": _WRITTEN[model.activation],
        "layer_norm_epsilon": model.norm_epsilon,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": 0.0,
    }


def _rotary_fields(model: ModelConfig, kind: str) -> Fields:
    rope: Fields = {"rope_type": "default", "rope_theta": model.rope_base}
    scaling = model.rope_scaling
    if scaling is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_seq,
        }
    if kind == "gpt_neox":
        rope["partial_rotary_factor"] = model.rope_fraction
    fields: Fields = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.width,
        "num_attention_heads": model.heads,
        "intermediate_size": model.mlp,
        "max_position_embeddings": model.seq,
        "hidden_act": _WRITTEN[model.activation],
        "rope_parameters": rope,
        "rope_scaling": None if scaling is None else rope,
    }
    if kind == "gpt_neox":
        return fields | {
            "layer_norm_eps": model.norm_epsilon,
            "rotary_emb_base": model.rope_base,
            "rotary_pct": model.rope_fraction,
            "attention_bias": model.qkv_bias,
            "use_parallel_residual": model.parallel_residual,
            "hidden_dropout": model.dropout,
            "attention_dropout": 0.0,
        }
    fields |= {
        "num_key_value_heads": model.kv,
        "head_dim": model.head,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_base,
        "attention_dropout": 0.0,
    }
    if kind == "llama":
        return fields | {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}
    if kind == "mistral":
        return fields | {"sliding_window": model.window}
    sliding: Fields = {"use_sliding_window": model.window is not None, "sliding_window": model.window}
    if model.window is not None:
        sliding["max_window_layers"] = 0
    return fields | sliding | ({"attention_bias": model.qkv_bias} if kind == "qwen3" else {})
