"""Who a process is among those of its run: said by flags, or found out from what started it.

    jaxgpt train --coordinator HOST:PORT --processes N --process I     by hand
    srun jaxgpt train                                                  Slurm
    mpirun jaxgpt train                                                Open MPI; others where mpi4py is installed
    a pod of an Indexed Job                                            Kubernetes, with the package kubernetes

What starts a process is recognized by JAX (jax._src.clusters), which is imported only where a launcher has left a mark.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from jaxgpt.errors import UserError, require

FLAGS = ("coordinator", "processes", "process")
BY_HAND = "give --coordinator HOST:PORT --processes N --process I"
ALONE = "--processes 1 runs this process alone"
JOIN = "JAXGPT_JOIN_SECONDS"
"""Environment variable: how long processes wait for each other at the start."""
JOIN_SECONDS = 50.0

_MARKS = {
    "SLURM_STEP_NODELIST": ("Slurm", "SLURM_NTASKS"),
    "OMPI_COMM_WORLD_SIZE": ("Open MPI", "OMPI_COMM_WORLD_SIZE"),
    "PMI_SIZE": ("MPI", "PMI_SIZE"),
    "JOB_COMPLETION_INDEX": ("Kubernetes", None),
}
"""Variable that a launcher sets: its name, and the variable that says how many processes it has started."""


@dataclass(frozen=True)
class Launch:
    """One of several processes."""

    host: str
    """Where process 0 is to be reached ..."""
    port: int
    """... and at which port."""
    count: int
    index: int
    local: int | None = None
    """Number of this process among those on its host, where the launcher says it: the accelerator that it takes."""

    @property
    def coordinator(self) -> str:
        """HOST:PORT."""
        return f"{self.host}:{self.port}"


def seconds() -> float:
    """How long to wait for the other processes at the start."""
    text = os.environ.get(JOIN)
    try:
        found = JOIN_SECONDS if text is None else float(text)
    except ValueError:
        found = 0.0
    require(found > 0, JOIN, text, "must be a number of seconds above 0")
    return found


def launch(args: Sequence[str], environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Who this process is, by the flags in args or by what started it; None: the only one. Raises UserError."""
    texts = {name: text for name in FLAGS if (text := _text(args, f"--{name}")) is not None}
    if texts == {"processes": "1"}:
        return None
    return _by_flags(texts) if texts else _by_launcher(environment)


def _text(args: Sequence[str], flag: str) -> str | None:
    """What follows a flag, the last time that it is given."""
    found = None
    for place, arg in enumerate(args):
        name, equals, text = arg.partition("=")
        if name == flag:
            found = text if equals else "".join(args[place + 1 : place + 2])
    return found


def _by_flags(texts: Mapping[str, str]) -> Launch | None:
    first = next(iter(texts))
    missing = [f"--{name}" for name in FLAGS if name not in texts]
    if missing:
        raise UserError(
            f"--{first} {texts[first]}: needs {' and '.join(missing)} too; {BY_HAND}, or use srun or mpirun"
        )
    count, index = (_number(f"--{name}", texts[name]) for name in ("processes", "process"))
    require(count >= 1, "--processes", count, "must be at least 1")
    allowed = f"must be from 0 to {count - 1}, since --processes is {count}"
    require(0 <= index < count, "--process", index, allowed)
    host, port = _address(texts["coordinator"])
    return Launch(host, port, count, index) if count > 1 else None


def _number(flag: str, text: str) -> int:
    require(text.isascii() and text.isdecimal(), flag, text, "must be a whole number, not below 0")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    good = bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
    require(good, "--coordinator", text, "must be HOST:PORT, process 0's host and a free port there")
    return host.strip("[]"), int(port)


def _by_launcher(environment: Mapping[str, str]) -> Launch | None:
    for mark, (name, counter) in _MARKS.items():
        if mark in environment:
            count = environment.get(counter, "") if counter else ""
            return None if count == "1" else _detected(name)
    return None


def _detected(name: str) -> Launch | None:
    """What JAX finds out of a launcher that has left its mark."""
    from jax._src.clusters import ClusterEnv

    def found(method: str | None) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
        return ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, method, int(seconds()))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a missing package, which is said below
            address, count, index, local = found(None)
            if address is None and find_spec("mpi4py"):
                address, count, index, local = found("mpi4py")
    except (RuntimeError, ValueError, KeyError, OSError, AttributeError) as error:
        raise UserError(f"{name}: its processes cannot be found ({error}); {BY_HAND}; {ALONE}") from None
    if address is None or count is None or index is None:
        package = {"Kubernetes": "kubernetes"}.get(name, "mpi4py")
        raise UserError(
            f"{name} has started this process, and its peers cannot be found without the package {package}; "
            f"install that, or {BY_HAND}; {ALONE}"
        )
    host, port = _address(address)
    return Launch(host, port, count, index, next(iter(local or ()), None)) if count > 1 else None
