"""The mesh: from the text a user writes to named axes over devices, checked before anything is built."""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxgpt import host_memory
from jaxgpt.config import RunConfig, padded_vocabulary
from jaxgpt.errors import UserError, require
from jaxgpt.pipeline import schedule_file
from jaxgpt.pipeline.microbatches import micro_batch
from jaxgpt.pipeline.placement import place
from jaxgpt.processes import together
from jaxgpt.sharding.idle import idle
from jaxgpt.sharding.rows import AXES, TENSOR, rows

MOST_CPU_DEVICES = 2048
"""What XLA's CPU client allows."""
MOST_DEVICES = 2**20
AUTO = "auto"
"""The text of a mesh that is still to be chosen (planner.search)."""

Sizes = dict[str, int]
"""Devices along each of AXES; their product is the number of devices."""


@runtime_checkable
class Located(Protocol):
    """What the placement reads of a device."""

    @property
    def id(self) -> int: ...
    @property
    def process_index(self) -> int: ...
    @property
    def platform(self) -> str: ...


D = TypeVar("D", bound=Located)


# The text


def parse(text: str, devices: int | None = None) -> Sizes:
    """ "data=2,fsdp=2,tensor=2" as sizes of all AXES, absent ones 1.

    One size may be -1: what the others leave of `devices`. Empty text puts all devices on data. `devices` None
    checks no product. Raises UserError naming the item, what is allowed, and the nearest meshes.
    """
    given = _items(text)
    if not text.strip():
        given = {"data": -1}
    open_axes = [axis for axis, size in given.items() if size == -1]
    require(len(open_axes) < 2, "--mesh", text, f"only one size may be -1, not {' and '.join(open_axes)}")
    product = math.prod(size for size in given.values() if size != -1)
    if devices is None:
        require(not open_axes, "--mesh", repr(text), "the number of devices is not known", "write every size")
    elif open_axes:
        if devices % product:
            fits = f"the sizes given must divide the {_count(devices)}, and their product {product} does not"
            raise UserError(f"--mesh {text}: {fits}; {_alternatives(given, devices)}")
        given[open_axes[0]] = devices // product
    elif product != devices:
        fits = f"the product {product} is not the number of devices, {devices}"
        raise UserError(f"--mesh {text}: {fits}; {_alternatives(given, devices)}")
    return {axis: given.get(axis, 1) for axis in AXES}


def devices_named(text: str) -> int | None:
    """The number of devices that the text asks for; None where it takes all there are (-1, or empty)."""
    given = _items(text)
    return None if not given or -1 in given.values() else math.prod(given.values())


def format_mesh(sizes: Sizes) -> str:
    """The text of sizes, without axes of size 1; "data=1" where all are."""
    return ",".join(f"{axis}={sizes[axis]}" for axis in AXES if sizes[axis] > 1) or "data=1"


def _items(text: str) -> Sizes:
    given: Sizes = {}
    named = "jaxgpt plan names the fastest meshes"
    require(text.strip() != AUTO, "--mesh", text, "only train and plan choose a mesh", named)
    for item in text.split(",") if text.strip() else []:
        axis, equals, size = (part.strip() for part in item.partition("="))
        require(bool(equals and axis), "--mesh", text, f"{item!r} is not axis=size", 'for example "data=2,tensor=2"')
        require(axis != "expert", "--mesh", text, "models have no experts, so there is no expert axis", "leave it out")
        if axis not in AXES:
            close = get_close_matches(axis.lower(), AXES, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(f"--mesh {text}: {axis!r} is not an axis; {hint}known are {', '.join(AXES)}")
        require(axis not in given, "--mesh", text, f"{axis} is given twice", "name each axis once")
        positive = re.fullmatch("[0-9]{1,7}", size) is not None and int(size) > 0
        allowed = f"the size of {axis}, {size!r}, must be a positive whole number, or -1 once"
        require(positive or size == "-1", "--mesh", text, allowed, "axes are parted by commas")
        given[axis] = int(size)
    product = math.prod(given.values())
    require(product <= MOST_DEVICES, "--mesh", text, f"{product} devices are more than the {MOST_DEVICES} allowed")
    return given


def _alternatives(given: Sizes, devices: int) -> str:
    """The nearest meshes of that many devices over the axes named."""
    named = tuple(axis for axis in AXES if axis in given)
    target = {axis: abs(given.get(axis, 1)) for axis in AXES}
    return _listed(target, factorisations(devices, named), devices)


# Divisibility


def check(config: RunConfig, sizes: Sizes) -> list[str]:
    """Refuses a mesh that the model or the batch cannot be divided over; returns notes for the user.

    Raises UserError with flag and value, and up to three of the nearest legal meshes of as many devices where another
    mesh is what mends it.
    """
    if config.stages != "auto":  # another mesh would not help
        place(config.model.layers, sizes["pipe"], config.virtual_stages, config.stages)
    complaint = next(complaints(config, sizes), None)
    if complaint is not None:
        if not complaint.startswith(("--mesh", "--layers", "--global-batch")):  # another flag would mend it
            raise UserError(complaint)
        devices = math.prod(sizes.values())
        raise UserError(f"{complaint}; {_listed(sizes, legal_meshes(config, devices), devices)}")
    return [*idle(config, sizes), *_copied_heads(config, sizes)]


def _copied_heads(config: RunConfig, sizes: Sizes) -> list[str]:
    tensor, model = sizes["tensor"], config.model
    if tensor <= model.kv or not rows(config, sizes).activations["heads"]:
        return []
    copies = tensor // model.kv
    return [f"{model.kv} key-value heads on tensor={tensor}: each is held and computed on {copies} devices"]


def legal_meshes(config: RunConfig, devices: int) -> list[Sizes]:
    """All meshes of that many devices which check allows."""
    return [sizes for sizes in factorisations(devices) if allows(config, sizes)]


def allows(config: RunConfig, sizes: Sizes) -> bool:
    """Whether check would let the configuration onto a mesh of these sizes."""
    return next(complaints(config, sizes), None) is None


def complaints(config: RunConfig, sizes: Sizes) -> Iterator[str]:
    """Each rule that the sizes break, in the order in which a user should hear of them."""
    model, global_batch, micro_batch = config.model, config.global_batch, config.micro_batch
    mesh, tensor, fsdp = f"--mesh {format_mesh(sizes)}", sizes["tensor"], sizes["fsdp"]
    yield from _pipeline_complaints(config, sizes, mesh)
    table = rows(config, sizes)
    if table.activations["heads"] and model.heads % tensor:
        yield f"{mesh}: tensor={tensor} must divide --heads {model.heads}"
    if table.activations["heads"] and model.kv % tensor and tensor % model.kv:
        yield f"{mesh}: tensor={tensor} must divide --kv-heads {model.kv}, or be a multiple of it"
    if table.activations["mlp"] and model.mlp % tensor:
        yield f"{mesh}: tensor={tensor} must divide the feed-forward width (mlp_width) {model.mlp}"
    shares = tensor * sizes["pipe"]
    if table.activations["vocab"] and model.padded_vocab % shares:
        fix = f"as it does for --vocab {_dividing(model.vocab, shares)}"
        yield f"{mesh}: tensor x pipe = {shares} must divide the padded --vocab {model.padded_vocab}, {fix}"
    parts = math.prod(sizes[axis] for axis in table.rest)
    if model.width % parts:
        product = f"{' x '.join(table.rest)} = {parts}" if len(table.rest) > 1 else f"{table.rest[0]}={parts}"
        yield f"{mesh}: {product} must divide --width {model.width}"
    context = sizes["context"]
    if context > 1 and model.seq % (2 * context):
        yield f"{mesh}: 2 x context = {2 * context} must divide --seq {model.seq}"
    if TENSOR in table.activations["seq"] and (model.seq // context) % tensor:
        yield f"{mesh}: context x tensor = {context * tensor} must divide --seq {model.seq} with --sequence-parallel"
    if context > 1 and sizes["pipe"] > 1 and config.context_attention == "ring":
        why = "a ring's permutes wait for all devices, and in a pipeline some stages are idle"
        yield f"--context-attention ring: not over pipe={sizes['pipe']}, since {why}; take gather"
    if context > 1 and model.window is not None:
        yield f"{mesh}: context must be 1 for a model with a window, {model.window}: its parts see a few others alone"
    shares = sizes["data"] * fsdp
    if global_batch % shares:
        yield f"--global-batch {global_batch}: must be a multiple of data x fsdp = {shares} ({mesh})"
    elif micro_batch is not None and (global_batch // shares) % micro_batch:
        share = global_batch // shares
        fix = f"such as {math.gcd(share, micro_batch)}"
        yield f"--micro-batch {micro_batch}: must divide a device's share of --global-batch, {share}, {fix} ({mesh})"


def _dividing(vocab: int, parts: int) -> int:
    """The smallest vocabulary of at least as many entries whose padded size so many parts divide."""
    padded = padded_vocabulary(vocab)
    while padded % parts:
        padded = padded_vocabulary(padded + 1)
    return padded


def _pipeline_complaints(config: RunConfig, sizes: Sizes, mesh: str) -> Iterator[str]:
    """What layers, virtual stages and microbatches do not allow."""
    stages, chunks = sizes["pipe"], config.virtual_stages
    own = bool(config.schedule_file)
    interleaved = config.schedule == "interleaved" and not own
    if chunks > 1 and not ((interleaved or own) and stages > 1):
        fix = "give --virtual-stages 1, or --schedule interleaved and a pipe axis"
        yield f"--virtual-stages {chunks}: only --schedule interleaved on a mesh with pipe > 1 has them; {fix}"
    if interleaved and chunks == 1 and stages > 1:
        yield "--virtual-stages 1: --schedule interleaved needs at least 2; give --virtual-stages 2"
    try:
        place(config.model.layers, stages, chunks, config.stages)
    except UserError as error:
        yield f"{error} ({mesh})"
    shares = sizes["data"] * sizes["fsdp"]
    each, share = micro_batch(config, sizes), config.global_batch // shares
    if config.global_batch % shares or share % each:
        return  # which is said of the batch, below
    count = share // each
    if own and stages > 1:
        try:
            schedule_file.read(config.schedule_file, (stages, count, chunks))
        except UserError as error:
            yield str(error)
    if interleaved and count % stages:
        fix = "change --global-batch or --micro-batch, or take another schedule"
        yield f"--schedule interleaved: pipe={stages} must divide the {count} microbatches ({mesh}); {fix}"


def factorisations(devices: int, axes: Sequence[str] = AXES) -> list[Sizes]:
    """Every way to write `devices` as a product over these axes; the other axes are 1."""
    if not axes:
        return [dict.fromkeys(AXES, 1)] if devices == 1 else []
    small = [size for size in range(1, math.isqrt(devices) + 1) if devices % size == 0]
    divisors = {*small, *(devices // size for size in small)}
    return [rest | {axes[0]: size} for size in sorted(divisors) for rest in factorisations(devices // size, axes[1:])]


def _distance(a: Sizes, b: Sizes) -> float:
    """How far two meshes are apart: the doublings and halvings that lead from one to the other."""
    return sum(abs(math.log2(a[axis] / b[axis])) for axis in AXES)


def _listed(target: Sizes, candidates: list[Sizes], devices: int) -> str:
    """The three candidates nearest to target, for an error; of equally near ones those with less tensor first."""
    near = sorted(
        candidates,
        key=lambda sizes: (round(_distance(target, sizes), 9), sizes["tensor"], sizes["context"], sizes["fsdp"]),
    )
    if not near:
        return f"no mesh of {_count(devices)} fits this model and batch; change their sizes, or the number of devices"
    return f"nearest for {_count(devices)}: {' or '.join(format_mesh(sizes) for sizes in near[:3])}"


def _count(devices: int) -> str:
    return f"{devices} device" + "s" * (devices != 1)


# The devices


def prepare_devices(n: int | None) -> tuple[list[jax.Device], str | None]:
    """n devices (None: all there are), and a note where they are virtual or not all.

    Starts JAX's backends. Where there is no accelerator, n virtual CPU devices are made; that can be done only
    before JAX has started. Raises UserError with the count where there are fewer than n.
    """
    if (share := together.share(n)) is not None:
        wanted = share if together.count() > 1 else max(min(share, MOST_CPU_DEVICES), _cpu_devices_set())
        # Harmless where there is an accelerator; refused, and so ignored, where JAX has already started.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", wanted)
    if _only_cpu():
        host_memory.keep(_cpu_devices_set())  # before the backend starts its threads
    taken, note = take(jax.devices(), n)
    together.check_shares(taken)
    return taken, note


def _only_cpu() -> bool:
    """Whether JAX, not yet started, has nothing but the CPU to start on."""
    if asked := jax.config.values["jax_platforms"]:
        return bool(asked == "cpu")
    return not entry_points(group="jax_plugins") and find_spec("libtpu") is None


def take(devices: Sequence[D], n: int | None) -> tuple[list[D], str | None]:
    """The first n devices (None: all), host by host, and a note; the part of prepare_devices after the start."""
    ordered, there = sorted(devices, key=_place), len(devices)
    n = there if n is None else n
    wanted = f"of {_count(n)}"
    if ordered[0].platform == "cpu":
        require(n <= MOST_CPU_DEVICES, "--mesh", wanted, f"at most {MOST_CPU_DEVICES} virtual CPU devices can be made")
        fix = f"restart, and run jaxgpt.use_devices({n}) first, at the top of the notebook or script"
        require(n <= there, "--mesh", wanted, f"JAX has already started with {there}", fix)
        return ordered[:n], f"no accelerator found: {n} virtual CPU devices" if n > 1 else None
    require(n <= there, "--mesh", wanted, f"there are {there}", "take a smaller mesh")
    return ordered[:n], f"{n} of {there} devices are used" if n < there else None


def use_devices(n: int) -> None:
    """Makes sure of n devices, virtual ones where there is no accelerator: to be called before JAX starts.

    Raises UserError where JAX has already started with fewer, or there are fewer accelerators.
    """
    require(n >= 1, "use_devices", n, "must be at least 1")
    prepare_devices(n)


def _cpu_devices_set() -> int:
    """Virtual CPU devices that the user has asked JAX for, by either of its two settings."""
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    setting: int = jax.config.values["jax_num_cpu_devices"]
    return max(int(flag[1]) if flag else 0, setting)


def build(sizes: Sizes, devices: Sequence[Located]) -> Mesh:
    """The mesh over these devices, all AXES in it, all in the types (Explicit).

    Devices are laid host by host with tensor innermost: a tensor group whose size divides a host's devices stays
    inside the host.
    """
    ordered = np.array(sorted(devices, key=_place), dtype=object)
    shape = tuple(sizes[axis] for axis in AXES)
    return Mesh(ordered.reshape(shape), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def crossing_axes(mesh: Mesh) -> list[str]:
    """The axes along which neighbours lie on different hosts (processes), so that they talk over the network."""
    hosts = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    return [axis for i, axis in enumerate(mesh.axis_names) if np.diff(hosts, axis=i).any()]


def _place(device: Located) -> tuple[int, int]:
    return device.process_index, device.id
