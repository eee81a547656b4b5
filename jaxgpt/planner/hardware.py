"""What a plan is made for: devices, their memory, and the links between them, as data.

    find("h100"); find("mine.toml"); present(jax.devices())

The table is hardware.toml beside this file, which says what each number means. A user's own file, TOML or JSON, has the
same form: one device's table, or several under their names.
"""

import dataclasses
import difflib
import functools
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Protocol

from jaxgpt.errors import UserError

Dtype = Literal["bf16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """bandwidth: bytes a second of one device in one direction; latency: seconds a message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that are reached: by a large matrix product, the fused attention kernel with heads of 128, a
    pass over memory, and collectives inside and between hosts."""

    products: float
    attention: float
    memory: float
    inside: float
    between: float


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """bandwidth: bytes a second between one device and its host, in one direction, as reached when all devices of the
    host do so; memory: bytes of the host's that are one device's share."""

    bandwidth: float
    memory: float


PCIE3 = HostMemory(bandwidth=6e9, memory=64e9)
"""What is taken of a device whose file says nothing of its host: half of PCIe 3.0 with 16 lanes."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """TFLOP/s of one device by type of the operands; bf16 stands for any 16-bit type."""

    bf16: float
    fp32: float


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device, and how many of them are wired; hardware.toml explains each field."""

    name: str
    kind: str
    tflops: Peaks
    memory: int
    bandwidth: float
    units: int
    gap: float
    host: int
    inside: Link
    between: Link
    efficiency: Efficiency
    offload: HostMemory = PCIE3
    pairwise: bool = False
    shared: bool = False

    def __hash__(self) -> int:
        """Of the name alone: a search asks for it thousands of times."""
        return hash(self.name)

    def peak(self, dtype: Dtype) -> float:
        """FLOP/s of one device."""
        return 1e12 * float(getattr(self.tflops, dtype))

    def to_json(self) -> dict[str, Any]:
        """What a hardware file holds, without the name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "name"}


class Kind(Protocol):
    """What is read of a device that is present."""

    @property
    def device_kind(self) -> str: ...
    @property
    def process_index(self) -> int: ...


@functools.cache
def table() -> Mapping[str, Hardware]:
    """The hardware known by name."""
    text = resources.files("jaxgpt.planner").joinpath("hardware.toml").read_text(encoding="utf-8")
    return {name: _hardware(fields, name, "hardware.toml") for name, fields in tomllib.loads(text).items()}


def find(name: str) -> Hardware:
    """Of the table; or of a file, "mine.toml" or "mine.toml:big" where it holds several.

    Raises UserError with what is known, or naming file and field.
    """
    known = table()
    if name in known:
        return known[name]
    path, _, chosen = name.partition(":")
    if path.endswith((".toml", ".json")):
        return _stored(Path(path), chosen)
    close = [each for each in known if name and each.startswith(name.lower())]
    close = close or difflib.get_close_matches(name.lower(), known, n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise UserError(f"--hardware {name}: not known; {hint}known are {', '.join(known)}, or a .toml or .json file")


def present(devices: list[Any]) -> Hardware:
    """The table's entry for devices that are there, with as many in a host as there are; virtual CPU devices each have
    their share of the host's memory.

    Raises UserError where their kind is not in the table.
    """
    kind = str(devices[0].device_kind)
    found = next((each for each in table().values() if re.fullmatch(each.kind, kind)), None)
    if found is None:
        fix = "give --hardware, or a hardware file for it"
        raise UserError(f"--hardware: devices of the kind {kind!r} are not in the table ({', '.join(table())}); {fix}")
    first = devices[0].process_index
    host = sum(device.process_index == first for device in devices)
    if kind != "cpu":
        return dataclasses.replace(found, host=host)
    return dataclasses.replace(found, memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // host)


# Files


def _stored(path: Path, chosen: str) -> Hardware:
    try:
        text = path.read_text(encoding="utf-8")
        fields = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UserError(f"--hardware {path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # of either format, and of what is not UTF-8
        raise UserError(f"--hardware {path}: not {path.suffix[1:].upper()} ({error})") from None
    if not isinstance(fields, dict):
        raise UserError(f"--hardware {path}: must be a table of fields, or of such tables")
    if "tflops" in fields:
        return _hardware(fields, f"{path}", str(path))
    tables = {name: each for name, each in fields.items() if isinstance(each, dict)}
    if not tables:
        raise UserError(f"--hardware {path}: has neither tflops, as one device's fields do, nor tables of such fields")
    named = chosen or (next(iter(tables)) if len(tables) == 1 else "")
    if named not in tables:
        value, known = f"{path}:{chosen}" if chosen else f"{path}", ", ".join(tables)
        raise UserError(f"--hardware {value}: must name one of its tables ({known}), as {path}:NAME")
    return _hardware(tables[named], f"{path}:{named}", f"{path}, {named}")


def _hardware(fields: Mapping[str, Any], name: str, where: str) -> Hardware:
    given = {"name": name, "kind": "", **fields}
    return _built(Hardware, given, where)


def _built(kind: Any, given: Mapping[str, Any], where: str) -> Any:
    """A value of a class from a file's table. Raises UserError naming the file and the field."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(f"--hardware {where}: unknown {name}; {hint}known are {', '.join(known)}")
    lacking = [n for n, field in known.items() if n not in given and field.default is dataclasses.MISSING]
    if lacking:
        raise UserError(f"--hardware {where}: {', '.join(lacking)} missing; hardware.toml in jaxgpt explains each")
    most = 1.0 if kind is Efficiency else math.inf
    return kind(**{name: _value(name, known[name].type, value, where, most) for name, value in given.items()})


def _value(name: str, hint: Any, value: Any, where: str, most: float) -> Any:
    """A field's value, of its type and in its range."""
    said = f"--hardware {where}: {name} {json.dumps(value, default=str)}"
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise UserError(f"{said}: must be a table of its own")
        return _built(hint, value, f"{where}, {name}")
    if hint in (str, bool):
        if not isinstance(value, hint):
            raise UserError(f"{said}: must be {'a text' if hint is str else 'true or false'}")
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value <= most or math.isinf(value):
        raise UserError(f"{said}: must be a number above 0" + (f" and at most {most:g}" if most == 1 else ""))
    if hint is int and value != int(value):
        raise UserError(f"{said}: must be a whole number")
    return hint(value)
