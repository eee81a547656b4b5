"""A configuration as a file: written, read, and held against another."""

import dataclasses
import json
import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxgpt.config import ModelConfig, RopeScaling, RunConfig
from jaxgpt.errors import UserError


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
