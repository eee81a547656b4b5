"""jaxgpt: train a GPT on as many devices as there are, by saying how tensors lie on them.

    import jaxgpt
    run = jaxgpt.load("runs/mine", mesh="tensor=2")
    run.model(tokens); run.generate("def "); run.layouts()

Nothing is computed, and JAX is not started, when this is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxgpt.config import ModelConfig, RunConfig
    from jaxgpt.errors import UserError
    from jaxgpt.loaded import Run, load
    from jaxgpt.presets import preset
    from jaxgpt.sharding.mesh import use_devices
    from jaxgpt.training.run import evaluate, train

__all__ = ["ModelConfig", "Run", "RunConfig", "UserError", "evaluate", "load", "preset", "train", "use_devices"]

_PLACES = {
    "ModelConfig": "config",
    "Run": "loaded",
    "RunConfig": "config",
    "UserError": "errors",
    "evaluate": "training.run",
    "load": "loaded",
    "preset": "presets",
    "train": "training.run",
    "use_devices": "sharding.mesh",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module jaxgpt has no attribute {name}")
    return getattr(importlib.import_module(f"jaxgpt.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
