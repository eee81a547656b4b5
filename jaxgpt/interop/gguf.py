"""GGUF files of LLaMA-type models: configuration, tensors and tokenizer, through the gguf package."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import ModelConfig, RopeScaling
from jaxgpt.data.tokenizer import LibraryTokenizer
from jaxgpt.errors import UserError
from jaxgpt.interop import gguf_tokenizer
from jaxgpt.interop.families import GGUF

SUFFIX = ".gguf"
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q6_K")
"""Types of tensors that are read; what is quantized becomes fp32."""


class GGUFFile:
    """An open file."""

    def __init__(self, path: Path) -> None:
        """Raises UserError where the file cannot be read, is damaged, or is of an architecture that is not known."""
        reader, self._dequantize = _package()
        self.path = path
        try:
            opened = reader(str(path))
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise UserError(f"{path}: not a whole GGUF file ({error}); fetch it again") from None
        self._fields: dict[str, Any] = opened.fields
        self._tensors = {tensor.name: tensor for tensor in opened.tensors}
        self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}
        self._kind = ""
        kind = self.get("general.architecture")
        if kind not in GGUF:
            raise UserError(f"{path}: {kind!r} is not an architecture that is read; known are {', '.join(GGUF)}")
        self.family, self._kind = GGUF[kind], kind
        self._last: tuple[str, np.ndarray] | None = None

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the file; `{arch}` stands for the architecture."""
        field = self._fields.get(self._shown(name))
        try:
            return default if field is None else field.contents()
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise UserError(f"{self.path}: field {self._shown(name)} is damaged ({error}); fetch it again") from None

    def _shown(self, name: str) -> str:
        return name.replace("{arch}", self._kind)

    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor in fp32; the last one is kept, since each device asks for its part of it."""
        if self._last is None or self._last[0] != name:
            tensor = self._tensors[name]
            if tensor.tensor_type.name not in TYPES:
                kind = tensor.tensor_type.name
                raise UserError(
                    f"{self.path}: tensor {name} is {kind}, which is not read; known are {', '.join(TYPES)}"
                )
            values = self._dequantize(tensor.data, tensor.tensor_type)
            self._last = name, np.asarray(values, np.float32).reshape(self.shapes[name])
        return self._last[1]

    def config(self) -> ModelConfig:
        """The model that the file's fields say. Raises UserError where one is missing or not supported."""
        heads = self._whole("{arch}.attention.head_count")
        width = self._whole("{arch}.embedding_length")
        vocab = self.shapes.get("token_embd.weight", (0,))[0]
        head = self._whole("{arch}.attention.key_length", width // heads)
        rotated = self._whole("{arch}.rope.dimension_count", head)
        biased = "blk.0.attn_q.bias" in self.shapes
        if rotated != head:
            raise UserError(f"{self.path}: rope.dimension_count {rotated}: only all {head} of a head are supported")
        return ModelConfig(
            layers=self._whole("{arch}.block_count"),
            width=width,
            heads=heads,
            kv_heads=self._whole("{arch}.attention.head_count_kv", heads),
            head_width=head,
            mlp_width=self._whole("{arch}.feed_forward_length"),
            vocab=vocab,
            seq=self._whole("{arch}.context_length"),
            positions="rotary",
            rope_base=self._number("{arch}.rope.freq_base", 10_000.0),
            rope_scaling=self._scaling(),
            norm="rmsnorm",
            norm_bias=False,
            norm_epsilon=_decimal(self._number("{arch}.attention.layer_norm_rms_epsilon", 1e-5)),
            activation="silu",
            gated=True,
            qkv_bias=biased,
            attention_bias=False,
            mlp_bias=False,
            qk_norm="blk.0.attn_q_norm.weight" in self.shapes,
            tied="output.weight" not in self.shapes,
        )

    def _whole(self, name: str, default: int | None = None) -> int:
        """A field that is a whole number above 0: one for each layer is none."""
        found = self.get(name, default)
        if not isinstance(found, int) or found < 1:
            raise UserError(f"{self.path}: field {self._shown(name)} {found!r}: must be a whole number above 0")
        return found

    def _number(self, name: str, default: float) -> float:
        found = self.get(name, default)
        if not isinstance(found, int | float):
            raise UserError(f"{self.path}: field {self._shown(name)} {found!r}: must be a number")
        return float(found)

    def _scaling(self) -> RopeScaling | None:
        if "rope_freqs.weight" in self.shapes:
            raise UserError(f"{self.path}: rope_freqs.weight: frequencies stretched one by one are not supported")
        kind = self.get("{arch}.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind != "linear":
            raise UserError(f"{self.path}: rope.scaling.type {kind!r}: only none and linear are supported")
        return RopeScaling(kind="linear", factor=self._number("{arch}.rope.scaling.factor", 1.0))

    def tokenizer(self) -> LibraryTokenizer | None:
        """The file's tokenizer; None where it has none. Raises UserError for one of a kind that is not read."""
        return gguf_tokenizer.tokenizer(self.path, self.get)

    def beside(self) -> dict[str, Any]:
        """What Hugging Face's folders keep beside a tokenizer: fields of tokenizer_config.json, and token ids."""
        entries: list[str] = self.get("tokenizer.ggml.tokens", [])
        fields: dict[str, Any] = {}
        for part in ("bos", "eos"):
            number = self.get(f"tokenizer.ggml.{part}_token_id")
            if isinstance(number, int) and 0 <= number < len(entries):
                fields[f"{part}_token"] = entries[number]
                fields[f"{part}_token_id"] = int(number)
        if template := self.get("tokenizer.chat_template"):
            fields["chat_template"] = template
        return fields


def _package() -> tuple[Any, Any]:
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError:
        raise UserError(
            "the gguf package is not installed, which reads .gguf files; pip install jaxgpt[gguf]"
        ) from None
    return GGUFReader, dequantize


def _decimal(value: float) -> float:
    """A fp32 number as the shortest decimal that it stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
