"""Whether a path names a model of somebody else's, and which: read without JAX, and without its weights."""

from pathlib import Path

from jaxgpt.config import ModelConfig
from jaxgpt.errors import UserError
from jaxgpt.interop import gguf, huggingface


def is_model(path: Path) -> bool:
    """Whether this is a GGUF file, or a folder that is a model of Hugging Face's and not a run."""
    if path.suffix == gguf.SUFFIX:
        return True
    config = path / huggingface.CONFIG
    try:
        fields = huggingface.read_json(config) if config.is_file() else {}
    except UserError:  # what is wrong with it is said by whoever wants a run
        return False
    return "model_type" in fields or "architectures" in fields


def config_file(folder: Path) -> Path:
    """The config.json of a model's folder. Raises UserError where there is none."""
    if not (folder / huggingface.CONFIG).is_file():
        raise UserError(f"{folder}: is no model (it has no {huggingface.CONFIG}); give its folder, or a .gguf file")
    return folder / huggingface.CONFIG


def read_config(path: Path) -> ModelConfig:
    """The configuration alone. Raises UserError where there is none, or it is not one that is supported."""
    if path.suffix == gguf.SUFFIX:
        return gguf.GGUFFile(path).config()
    return huggingface.read_config(config_file(path))[1]
