"""What is opened to be used: a trained run, a model of somebody else's, or one that is yet to be trained."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxgpt import host_memory
from jaxgpt.config import UNCUT, RunConfig
from jaxgpt.data import Tokenizer, cache_folder, given_tokenizer, load_tokenizer
from jaxgpt.errors import UserError, require
from jaxgpt.interop import beside, models
from jaxgpt.interop.places import is_model
from jaxgpt.model.parameters import parameter_count
from jaxgpt.processes import together
from jaxgpt.sharding import mesh
from jaxgpt.training import folder
from jaxgpt.training.console import Console, size
from jaxgpt.training.program import Program
from jaxgpt.training.resume import restore_last
from jaxgpt.training.retention import LAST


@dataclass(frozen=True)
class Trained:
    """A run, or a model of somebody else's, opened to be used."""

    config: RunConfig
    """As stored, on the mesh asked for."""
    program: Program
    params: dict[str, jax.Array]
    step: int
    """Steps trained; 0 for a model of somebody else's."""
    tokenizer: Tokenizer | None
    """None where a model has none."""
    beside: beside.Beside
    """Files that lie beside the tokenizer."""


def open_trained(run: Path, mesh_text: str, console: Console, step: str = LAST) -> Trained:
    """The parameters of a run's last whole checkpoint, or of that of a `step` (retention.find), or of a Hugging Face
    folder or GGUF file, on any mesh.

    Raises UserError where there are none, or the mesh does not fit.
    """
    model = models.open_model(run) if is_model(run) else None
    require(model is None or step == LAST, "--step", step, f"is of a run, but {run} is a model, which has no steps")
    stored = folder.stored_config(run) if model is None else RunConfig(model=model.config, global_batch=1)
    # there are no moments to hold, and a ring cannot be on every mesh
    config = dataclasses.replace(stored, mesh=mesh_text, offload="none", context_attention="auto", **UNCUT)
    devices, sizes = devices_for(config, console, training=False)
    # As many sequences at once on a device as in training, where that is known, and as divide over the devices.
    shares = sizes["data"] * sizes["fsdp"]
    share = config.micro_batch or -(-config.global_batch // shares)
    config = dataclasses.replace(config, global_batch=share * shares, micro_batch=share)
    mesh.check(config, sizes)
    program = Program(config, mesh.build(sizes, devices))
    if model is not None:
        params = model.onto(program.table, program.shardings)
        return Trained(config, program, params, 0, model.tokenizer, model.beside)
    targets = {"params": program.targets()["params"]}
    say = console.fallback
    restored = restore_last(run / "checkpoints", targets, program.logical, say, program.rows, wanted=step)
    if restored is None:
        raise UserError(f"{run}: has no checkpoint yet; train it further")
    tokenizer = run / "tokenizer"
    files = beside.read(tokenizer)
    return Trained(config, program, restored.state["params"], restored.step, load_tokenizer(tokenizer), files)


def open_new(config: RunConfig, console: Console) -> Trained:
    """The parameters that a run of this configuration begins with, on its mesh. Raises UserError where that does not
    fit."""
    tokenizer = given_tokenizer(config.tokenizer)
    if tokenizer is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab=tokenizer.size))
    devices, sizes = devices_for(config, console)
    program = Program(config, mesh.build(sizes, devices))
    return Trained(config, program, program.init()["params"], 0, tokenizer, {})


def devices_for(config: RunConfig, console: Console, training: bool = True) -> tuple[list[jax.Device], mesh.Sizes]:
    """Devices and axis sizes of the configuration's mesh, checked, and what the user should know of them said; all
    devices on data, unchecked, where the mesh is still to be chosen."""
    _keep_programs()
    text = "" if training and config.mesh == mesh.AUTO else config.mesh
    open_size = not text.strip() or "-1" in text
    count = None if open_size else math.prod(mesh.parse(text).values())
    devices, note = mesh.prepare_devices(count)
    sizes = mesh.parse(text, len(devices))
    notes = mesh.check(config, sizes) if training and config.mesh != mesh.AUTO else []
    for one in [note, *notes]:
        if one is not None:
            console.fallback(one)
    if (seen := together.described(devices)) is not None:
        console.say(seen)
    if training and devices[0].platform == "cpu":
        _refuse_what_no_host_holds(config)
    return devices, sizes


def _refuse_what_no_host_holds(config: RunConfig) -> None:
    """Refuses a model whose state alone, once over, is more than a CPU's memory, such as one planned for GPUs: before
    its data is prepared, which takes long, and before the system ends whatever it likes. The embedding is not counted,
    since only the tokenizer says how large it is."""
    entries = parameter_count(dataclasses.replace(config.model, vocab=1))
    need, room = 12 * entries // together.count(), host_memory.available()  # fp32, and two moments
    if need > room:
        raise UserError(
            f"on CPU devices: {entries:,} parameters and their moments take {size(need)}, but the "
            f"host has {size(room)} left; take a smaller model, or a machine with accelerators"
        )


def _keep_programs() -> None:
    """Compiled programs are kept beside the tokens, so that a second start is quick; unless the user has a place."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
