"""What a verb with train's flags is told: flags over a run, a plan, a model's folder or a preset."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from jaxgpt import presets
from jaxgpt.arguments import given, parse
from jaxgpt.config import RunConfig, uncut
from jaxgpt.flags import F, TrainFlags, defaults, override

_PLACES = {"preset", "run", "plan"}
"""Flags of train that say where to begin, not what."""


@dataclass(frozen=True)
class Configured(Generic[F]):
    """What a verb with train's flags is told."""

    config: RunConfig
    flags: F
    explicit: frozenset[str]
    """Fields of the configuration that were given, by a flag or a plan."""
    name: str
    """Of the preset."""


def configured(verb: str, kind: type[F], args: list[str]) -> Configured[F]:
    """Flags that are not given come from the plan that --plan names, from the run that --run names, if it exists, or
    from --preset. Raises UserError."""
    texts = given(verb, kind, args)
    run, preset, plan = texts.get("run"), texts.get("preset"), texts.get("plan")
    file = Path(run) / "config.json" if run and preset is None else None
    stored = file if file and file.is_file() else None
    name = preset or kind.preset
    base = presets.stored(stored) if stored else presets.preset(name)
    explicit = frozenset({field.name for field in dataclasses.fields(TrainFlags)} & set(texts) - _PLACES)
    planned: frozenset[str] = frozenset()
    if plan:
        from jaxgpt.planner import saved  # here, since plans know meshes, and they JAX

        found, planned = saved.read(Path(plan)), saved.FIELDS
        alone = stored is None and preset is None
        base = found.config if alone else found.onto(base, f"--run {run}" if stored else f"--preset {name}")
        name = plan if alone else name
    if (source := texts.get("init_from")) and not stored:
        base = _initialized(base, source, preset is not None)
    chosen = parse(verb, kind, args, defaults(kind, base, name, Path(run) if run else None))
    if stored and "mesh" in explicit and chosen.mesh != base.mesh:
        base = dataclasses.replace(base, **uncut(explicit | planned))
    config = override(base, {field: getattr(chosen, field) for field in explicit})
    return Configured(config, chosen, explicit | planned, Path(name).name.removesuffix(".json"))


def _initialized(base: RunConfig, source: str, preset: bool) -> RunConfig:
    """The base with the model and tokenizer of --init-from, and, unless a preset says another, a learning rate for a
    model that is trained already."""
    from jaxgpt.interop.places import read_config

    rate: dict[str, Any] = {} if preset else {"lr": 1e-4, "min_lr": 1e-5}
    return dataclasses.replace(base, model=read_config(Path(source)), tokenizer=source, init_from=source, **rate)
