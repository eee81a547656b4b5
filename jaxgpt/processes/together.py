"""What the processes of a run do together: begin, wait, tell, and end. With one process each of these is nothing.

with Joined(launch(args)):
    ...
"""

import dataclasses
import json
import os
import re
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import jax
from jax._src import distributed
from jaxlib import _jax

from jaxgpt.errors import UserError, told_of
from jaxgpt.processes import lines, peers
from jaxgpt.processes.launch import Launch, seconds
from jaxgpt.processes.peers import Peers
from jaxgpt.processes.service import HEARTBEAT, TIMEOUT, Service

WAIT = 600.0
"""Seconds for which a process waits at a barrier, unless it is said otherwise. That the others are alive is watched all
the while."""
BUILD = 12 * 3600.0
"""Seconds for which processes wait for one that makes what all need, such as stored tokens."""
_OF_PEERS = re.compile(r"gloo|nccl|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|onnection|oordination|closed by peer", re.I)
"""What errors say that another process's end brings about."""

T = TypeVar("T")
_joined: list[Peers] = []
_uses: Counter[str] = Counter()


def index() -> int:
    """Number of this process; 0 is the one that speaks and writes."""
    return distributed.global_state.process_id


def count() -> int:
    """Processes of this run."""
    return distributed.global_state.num_processes or 1


def is_first() -> bool:
    """Whether this process is the one that speaks and writes."""
    return index() == 0


def watched() -> Peers | None:
    """The watch over the other processes; None where there are none."""
    return _joined[-1] if _joined else None


class Joined:
    """A process among its peers, from the `with` on; alone where launch is None.

    An error inside ends all processes: process 0 prints it, and what another one has met with that one's name.
    """

    def __init__(self, launch: Launch | None) -> None:
        self._launch = launch
        self._service: Service | None = None

    def __enter__(self) -> None:
        if self._launch is None:
            return
        found, port = peers.meet(self._launch, self._serve)
        _python_alone_speaks()
        _joined.append(found)
        try:
            _initialize(self._launch, found, port)
        except RuntimeError as error:
            found.fail(f"the processes do not find each other ({error})", 2)

    def _serve(self) -> int:
        """On process 0: starts JAX's service at a free port."""
        assert self._launch is not None
        host = self._launch.host if self._launch.host in lines.LOCAL else "::"
        port = _free_port()
        self._service = Service(_address(host, port), self._launch.count)
        return port

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        found = watched()
        if self._launch is None or found is None:
            return
        if error is not None:
            _fail(found, error)
        sys.stdout.flush()
        found.leave()
        jax.distributed.shutdown()
        found.close()
        if self._service is not None:
            self._service.close()
        _joined.clear()


def _fail(found: Peers, error: BaseException) -> None:
    if isinstance(error, jax.errors.JaxRuntimeError) and _OF_PEERS.search(str(error)):
        found.verdict()
    said = told_of(error)
    if said is None:
        traceback.print_exception(error)
        first = " ".join(str(error).split())
        said = f"{type(error).__name__}: {first[:500]}", 1
    found.fail(*said)


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _python_alone_speaks() -> None:
    """Libraries of C++, Gloo among them, print about themselves on standard output: from here on to nobody."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    nobody = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nobody, 1)
    os.close(nobody)


def _initialize(launch: Launch, found: Peers, port: int) -> None:
    """As jax.distributed.initialize, which all processes reach at once; but the service lives elsewhere, and SIGTERM is
    left to the loop, which has a stop of its own."""
    state = distributed.global_state
    alone = found.hosts.count(found.hosts[launch.index]) == 1
    if launch.local is not None and not alone:  # one accelerator for each process of a host
        for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(name, str(launch.local))
    state.coordinator_address = _address(launch.host, port)
    state.process_id, state.num_processes = launch.index, launch.count
    state.client = _jax.get_distributed_runtime_client(
        state.coordinator_address,
        launch.index,
        init_timeout=int(seconds()),
        shutdown_timeout=TIMEOUT,
        heartbeat_timeout=HEARTBEAT,
        use_compression=True,
    )
    state.client.connect()


# Waiting and telling


class Everyone:
    """The processes of this run, as checkpoints take them (training.group): they may meet in any thread."""

    @property
    def index(self) -> int:
        """This process's number."""
        return index()

    @property
    def count(self) -> int:
        """How many there are."""
        return count()

    def exchange(self, name: str, said: str, timeout: float) -> list[str]:
        """What each process says. Raises TimeoutError where another has said nothing after `timeout` seconds."""
        try:
            return gathered(name, said, timeout)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise TimeoutError(f"{name}: another process has said nothing for {timeout:g} s") from None


EVERYONE = Everyone()


def wait(name: str, timeout: float = WAIT) -> None:
    """Returns when every process has come to the barrier `name` as often as this one. Raises UserError after
    `timeout` seconds."""
    if count() == 1:
        return
    try:
        _client().wait_at_barrier(_key(name), int(timeout * 1e3))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        absent = sorted({int(found) for found in re.findall(r"task:(\d+)", str(error).partition("timed out task")[2])})
        named = f"processes {', '.join(map(str, absent))}" if absent else "another process"
        raise UserError(f"{name}: {named} did not come here within {timeout:g} s") from None


def at_once(function: Any) -> Any:
    """A jitted function whose first call all processes begin together, when each has compiled it: a collective waits
    for the last process no longer than half a minute. All calls are with arrays of the same shapes."""
    if count() == 1:
        return function
    compiled: list[Any] = []

    def call(*args: Any) -> Any:
        if not compiled:
            compiled.append(function.lower(*args).compile())
            wait("a program is compiled")
        return compiled[0](*args)

    return call


def told(name: str, make: Callable[[], T], timeout: float = WAIT) -> T:
    """What process 0 makes, on every process; something that JSON can hold."""
    if count() == 1:
        return make()
    key = _key(name)
    if is_first():
        value = make()
        _client().key_value_set(key, json.dumps(value))
        return value
    found: T = json.loads(_value(key, timeout))
    return found


def gathered(name: str, value: Any, timeout: float = WAIT) -> list[Any]:
    """What each process says, in their order; something that JSON can hold."""
    if count() == 1:
        return [value]
    key = _key(name)
    _client().key_value_set(f"{key}/{index()}", json.dumps(value))
    return [json.loads(_value(f"{key}/{i}", timeout)) for i in range(count())]


@contextmanager
def first_alone(name: str, timeout: float = WAIT) -> Iterator[None]:
    """A block that process 0 runs first, and all others after it: what it makes, they find."""
    if not is_first():
        wait(name, timeout)
    yield
    if is_first():
        wait(name, timeout)


def _client() -> Any:
    """JAX's own connection to its service."""
    return distributed.global_state.client


def _key(name: str) -> str:
    """A name of its own for every use, the same on all processes."""
    _uses[name] += 1
    return f"jaxgpt/{name}/{_uses[name]}"


def _value(key: str, timeout: float) -> str:
    return str(_client().blocking_key_value_get(key, int(timeout * 1e3)))


# Devices


def share(devices: int | None) -> int | None:
    """How many of a mesh's devices each process holds; None where it takes all there are. Raises UserError where they
    cannot be shared out evenly."""
    if devices is None:
        return None
    if devices % count():
        raise UserError(
            f"--mesh: its {devices} devices cannot be shared evenly by {count()} processes; take a mesh whose size is "
            f"a multiple of {count()}, or another number of processes"
        )
    return devices // count()


def check_shares(devices: Sequence[Any]) -> None:
    """Raises UserError unless every process holds as many of a mesh's devices."""
    held = Counter(device.process_index for device in devices)
    if len(held) != count() or len(set(held.values())) > 1:
        each = ", ".join(f"process {i} has {held[i]}" for i in range(count()))
        raise UserError(
            f"--mesh: of its {len(devices)} devices {each}; every process must hold as many: take a mesh of all "
            "devices, or start other processes"
        )


def described(devices: Sequence[Any]) -> str | None:
    """What each process has: its host and its devices of a mesh; None of a single process."""
    found = watched()
    if found is None:
        return None
    held = [[device for device in devices if device.process_index == i] for i in range(count())]
    each = [
        f"{i} on {found.hosts[i]}: {len(mine)} x {mine[0].device_kind} ({', '.join(str(d.id) for d in mine)})"
        for i, mine in enumerate(held)
    ]
    return f"{count()} processes: {'; '.join(each)}"


# Stopping


@dataclasses.dataclass
class Stop:
    """When a run is to stop: at once with one process, with several before the same program on all."""

    received: Callable[[], int | None]
    """The signal that this process has received."""

    def ends(self) -> bool:
        """To be asked before each program that all processes launch: whether it is not to be."""
        found = watched()
        return self.received() is not None if found is None else found.gate.ends()

    @property
    def signal(self) -> int | None:
        """The signal that stopped the run, whichever process has received it."""
        found = watched()
        return self.received() if found is None else found.gate.signal
