"""`jaxgpt checkpoint`: a run's checkpoints listed, looked into, verified and exported. Needs neither JAX nor model."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.arguments import parse, verb_of
from jaxgpt.errors import UserError, require
from jaxgpt.file_flags import ListFlags, LookFlags, ParametersFlags, VerifyFlags
from jaxgpt.interop import safetensors
from jaxgpt.training import manifest, retention, zarr
from jaxgpt.training.chunks import slabs
from jaxgpt.training.console import Console, size
from jaxgpt.training.manifest import Manifest

HELP = """usage: jaxgpt checkpoint VERB [flags]

  ls        the checkpoints of a run: step, loss, size, when they were saved, and why they are kept
  inspect   what one holds: samples, loss, configuration, arrays
  verify    every byte against its checksum; names each damaged file
  export    the parameters of one as a safetensors file, without building the model

jaxgpt checkpoint VERB --help lists a verb's flags."""

ALL = "all"
_PARAMETERS = "params/"
_PIECE = 2**26
"""Most bytes of a tensor on the host at once."""


def main(args: list[str]) -> int:
    """Runs one of the verbs, and returns its exit status. Raises UserError."""
    verbs: dict[str, tuple[type, Callable[[Any, Console], int]]] = {
        "ls": (ListFlags, show_list),
        "inspect": (LookFlags, inspect),
        "verify": (VerifyFlags, verify),
        "export": (ParametersFlags, export),
    }
    found = verb_of(verbs, args, HELP, "checkpoint")
    if found is None:
        return 0
    (kind, run), verb, rest = found
    return run(parse(verb, kind, rest), Console())


def show_list(asked: ListFlags, console: Console) -> int:
    """Says which checkpoints there are. Raises UserError where there is none."""
    folder = _folder(asked.run)
    losses = retention.losses_in(folder)
    found = {step: _said(folder, step) for step in losses}
    latest = next((said for said in reversed(found.values()) if said is not None), None)
    configured: dict[str, Any] = {} if latest is None else latest.meta.get("config", {})
    why = retention.kept(losses, configured.get("keep", 1), configured.get("keep_every", 0))
    rows: list[tuple[object, ...]] = [("step", "loss", "samples", "size", "saved", "kept")]
    for step, said in found.items():
        where = manifest.path(folder, step)
        if said is None:
            rows.append((f"{step:,}", "", "", size(_bytes_in(where)), "", "damaged: see jaxgpt checkpoint verify"))
            continue
        reasons = ", ".join(why.get(step, ["until the next save"]))
        samples = said.meta.get("samples")
        shown = "" if samples is None else f"{samples:,}"
        rows.append((f"{step:,}", _loss(said), shown, size(_bytes_in(where)), _when(where), reasons))
    rows += [(entry.name, "", "", size(_bytes_in(entry)), "", "set aside") for entry in _set_aside(folder)]
    console.table(str(folder), rows)
    return 0


def inspect(asked: LookFlags, console: Console) -> int:
    """Says what a checkpoint holds. Raises UserError where it cannot be trusted."""
    folder = _folder(asked.run)
    step = retention.find(folder, asked.step)
    said, where = manifest.read(folder, step), manifest.path(folder, step)
    lengths = {name: int(np.prod(shape, dtype=int)) * kind.itemsize for name, (shape, kind) in said.arrays.items()}
    facts: list[tuple[object, ...]] = [
        ("step", f"{said.step:,}"),
        ("saved", _when(where)),
        ("validation loss", _loss(said) or "none: --eval-every does not meet this step"),
        *((name, value) for name, value in said.meta.items() if name != "config"),
        ("arrays", f"{len(lengths):,} of {size(sum(lengths.values()))}, {size(_bytes_in(where))} on the disk"),
    ]
    console.table(str(where), facts)
    console.table("configuration", [(name, str(value)) for name, value in _flat(said.meta.get("config", {}))])
    shown = [
        (name, " x ".join(map(str, shape)) or "scalar", str(kind), lengths[name])
        for name, (shape, kind) in said.arrays.items()
    ]
    console.table("arrays: shape without padding, type, bytes", shown)
    return 0


def verify(asked: VerifyFlags, console: Console) -> int:
    """Reads checkpoints in full, names each damaged file, and returns 1 where there is one."""
    folder = _folder(asked.run)
    wanted = manifest.steps(folder) if asked.step == ALL else [retention.find(folder, asked.step)]
    bad = 0
    for step in wanted:
        found, where = 0, manifest.path(folder, step)
        for file, wrong in damage(folder, step):
            console.say(f"{file}: {wrong}")
            found += 1
        console.say(f"{where}: " + (f"{found} damaged" if found else f"whole, {size(_bytes_in(where))}"))
        bad += bool(found)
    return int(bad > 0)


def damage(folder: Path, step: int) -> Iterator[tuple[Path, str]]:
    """Each damaged file of a checkpoint and what is wrong with it, by reading all of them; a file at a time is held."""
    where, wrong = manifest.path(folder, step), {}
    for file, what in manifest.complaints(folder, step):
        wrong[file] = what
        yield file, what
    if {where / manifest.MANIFEST, where / manifest.SUMS} & wrong.keys():
        return  # there is nothing to go by
    sums = None if where / manifest.CHUNKS in wrong else manifest.read_sums(folder, step)
    for name, (shape, kind) in manifest.parse(folder, step).arrays.items():
        array = where / "arrays" / name
        if array / "zarr.json" in wrong:
            continue
        for file_name, part in zarr.files(array, shape, kind):
            try:
                zarr.read(array, shape, kind, [part], None if sums is None else sums.get(name, {}))
            except zarr.Unreadable as error:
                yield array / file_name, f"array {name} is damaged ({error.reason})"


def export(asked: ParametersFlags, console: Console) -> int:
    """Writes a checkpoint's parameters into a file, whole or not at all. Raises UserError."""
    folder, out = _folder(asked.run), asked.out
    step = retention.find(folder, asked.step)
    require(out.suffix == ".safetensors", "OUT", out, "must end in .safetensors")
    require(out.parent.is_dir(), "OUT", out, "must be in a folder that is there")
    partial = out.with_name(out.name + ".partial")
    for there in (out, partial):
        require(not there.exists(), "OUT", there, "is there already", "give another name, or remove it")
    said = manifest.read(folder, step)
    tensors = {n.removeprefix(_PARAMETERS): found for n, found in said.arrays.items() if n.startswith(_PARAMETERS)}
    try:
        safetensors.write_pieces(partial, tensors, _pieces(folder, step, tensors))
        partial.rename(out)
    except OSError as error:
        raise UserError(f"OUT {out}: cannot be written ({error.strerror or error}); nothing is left of it") from None
    finally:
        partial.unlink(missing_ok=True)
    count = sum(int(np.prod(shape, dtype=int)) for shape, _ in tensors.values())
    console.say(f"{out}: {count:,} parameters in {len(tensors)} tensors, {size(out.stat().st_size)}, of step {step:,}")
    return 0


def _pieces(folder: Path, step: int, tensors: dict[str, tuple[tuple[int, ...], np.dtype]]) -> Iterator[np.ndarray]:
    sums = manifest.read_sums(folder, step)
    for tensor, (shape, kind) in tensors.items():
        name = _PARAMETERS + tensor
        for part in slabs(shape, kind.itemsize, _PIECE):
            try:
                yield zarr.read(manifest.path(folder, step) / "arrays" / name, shape, kind, [part], sums[name])[0]
            except zarr.Unreadable as error:
                raise UserError(
                    f"{error.file}: array {name} is damaged ({error.reason}); give another --step, "
                    f"such as one of {', '.join(map(str, manifest.steps(folder)))}"
                ) from None


def _folder(run: Path) -> Path:
    """Where the checkpoints are that a user means. Raises UserError where there is none."""
    for folder in (run / "checkpoints", run):
        if manifest.steps(folder):
            return folder
    raise UserError(f"{run}: holds no checkpoint; give the folder of a run, or the one in which its checkpoints are")


def _said(folder: Path, step: int) -> Manifest | None:
    """What a checkpoint says of itself; None where it cannot be trusted."""
    try:
        return manifest.read(folder, step)
    except manifest.DamagedCheckpoint:
        return None


def _loss(said: Manifest) -> str:
    return "" if said.loss is None else f"{said.loss:.4f}"


def _when(where: Path) -> str:
    """Of the commit, in this machine's time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((where / manifest.MANIFEST).stat().st_mtime))


def _bytes_in(where: Path) -> int:
    return sum(file.stat().st_size for file in where.rglob("*") if file.is_file())


def _set_aside(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.damaged*"))


def _flat(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
