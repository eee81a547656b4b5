"""Models that others made: a Hugging Face folder or a GGUF file, opened, checked, and read onto a mesh."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import NamedSharding

from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.data.tokenizer import Tokenizer, open_tokenizer
from jaxgpt.errors import UserError
from jaxgpt.interop import beside, gguf, huggingface, safetensors
from jaxgpt.interop.places import config_file
from jaxgpt.interop.tensors import Weights
from jaxgpt.model.parameters import Parameter

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZERS = ("tokenizer.json", "vocab.json", "encoder.json")


@dataclass(frozen=True)
class Model:
    """A model of somebody else's."""

    path: Path
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer | None
    """None where none lies with the model."""
    beside: beside.Beside

    def onto(self, table: Mapping[str, Parameter], shardings: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
        """The parameters, fp32, as the table has them and laid out as said."""
        return {name: self._placed(name, parameter, shardings[name]) for name, parameter in table.items()}

    def _placed(self, name: str, parameter: Parameter, sharding: NamedSharding) -> jax.Array:
        """One parameter: each device's part is read, sent and let go before the next, so that the host never holds
        more than one."""
        holders: dict[tuple[tuple[int | None, int | None], ...], list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(parameter.shape).items():
            holders.setdefault(tuple((part.start, part.stop) for part in index or ()), []).append(device)
        arrays = []
        for bounds, devices in holders.items():
            part = self.weights.read(name, parameter, tuple(slice(*bound) for bound in bounds))
            sent = [jax.device_put(part, device) for device in devices]
            jax.block_until_ready(sent)
            arrays += sent
        return jax.make_array_from_single_device_arrays(parameter.shape, sharding, arrays)


def begun_with(config: RunConfig) -> Model | None:
    """The model that a run's parameters are taken from at its start; None where they are drawn. Raises UserError."""
    return open_model(Path(config.init_from), config.model) if config.init_from else None


def open_model(path: Path, asked: ModelConfig | None = None) -> Model:
    """Opens a folder or file. Nothing is read but headers. asked: the model that it is to be; None: what it says.

    Raises UserError: no configuration, an architecture not known, no safetensors file, tensors that are not those of
    the configuration, a tokenizer with more entries than the model.
    """
    if path.suffix == gguf.SUFFIX:
        file = gguf.GGUFFile(path)
        config, tokenizer = asked or file.config(), file.tokenizer()
        weights = Weights(str(path), file, file.family, config)
        found = Model(path, config, weights, tokenizer, beside.from_gguf(file.beside()))
    else:
        family, config, fields = huggingface.read_config(config_file(path))
        config = asked or config
        weights = Weights(str(path), safetensors.SafeTensors(_files(path)), family, config)
        around = beside.with_ends(beside.read(path), fields)
        found = Model(path, config, weights, _tokenizer(path), around)
    if found.tokenizer is not None and found.tokenizer.size > found.config.vocab:
        size, vocab = found.tokenizer.size, found.config.vocab
        raise UserError(f"{path}: its tokenizer has {size} entries and its model {vocab}; fetch both again")
    return found


def _files(folder: Path) -> list[Path]:
    files = safetensors.files_in(folder)
    if files:
        return files
    if (folder / ".metadata").exists() or any(folder.glob("*.distcp")):
        tool = "convert it with Megatron Bridge's export to a Hugging Face folder"
        raise UserError(f"{folder}: is a Megatron checkpoint of the torch_dist kind, which is not read; {tool}")
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        cure = "save the model with safe_serialization=True, which makes model.safetensors"
        raise UserError(f"{folder}: has {pickles[0]} and no safetensors file, and pickles are never opened; {cure}")
    raise UserError(f"{folder}: has no {safetensors.SINGLE}; fetch it again")


def _tokenizer(folder: Path) -> Tokenizer | None:
    return open_tokenizer(str(folder)) if any((folder / name).is_file() for name in _TOKENIZERS) else None
