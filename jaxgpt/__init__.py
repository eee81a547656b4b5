"""jaxgpt: train a GPT on as many devices as there are, by saying how tensors lie on them.

    import jaxgpt
    run = jaxgpt.load("runs/mine", mesh="tensor=2")
    run(tokens); run.generate("def "); run.sbp()

Nothing is computed, and JAX is not started, when this is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxgpt.config import ModelConfig, RunConfig
    from jaxgpt.errors import UserError
    from jaxgpt.loaded import Run, load, start
    from jaxgpt.planner.auto.layout import auto_layout
    from jaxgpt.presets import preset
    from jaxgpt.sharding.boxing import to_sbp
    from jaxgpt.sharding.mesh import use_devices
    from jaxgpt.sharding.sbp import B, P, S, Signature, sbp
    from jaxgpt.told import explain, plan
    from jaxgpt.training.run import evaluate, train

_PLACES = {
    "B": "sharding.sbp",
    "ModelConfig": "config",
    "P": "sharding.sbp",
    "Run": "loaded",
    "RunConfig": "config",
    "S": "sharding.sbp",
    "Signature": "sharding.sbp",
    "UserError": "errors",
    "auto_layout": "planner.auto.layout",
    "evaluate": "training.run",
    "explain": "told",
    "load": "loaded",
    "plan": "told",
    "preset": "presets",
    "sbp": "sharding.sbp",
    "start": "loaded",
    "to_sbp": "sharding.boxing",
    "train": "training.run",
    "use_devices": "sharding.mesh",
}

__all__ = ["B", "ModelConfig", "P", "Run", "RunConfig", "S", "Signature", "UserError"]
__all__ += ["auto_layout", "evaluate", "explain", "load", "plan", "preset", "sbp", "start", "to_sbp", "train"]
__all__ += ["use_devices"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module jaxgpt has no attribute {name}")
    return getattr(importlib.import_module(f"jaxgpt.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
