"""The run folder: whose it is, which configuration it holds, and that no two processes use it at once.

config.json     the resolved configuration: data as a full path, the vocabulary's real size
data.json       what the tokens are: source, counts, checksums
tokenizer/      what turns text into this model's tokens
checkpoints/  metrics.jsonl  tensorboard/  loss.png  sample.txt  profile/  faults/
.lock           held by the process that trains in it
"""

import dataclasses
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from jaxgpt.config import RunConfig, uncut
from jaxgpt.config_file import differences, from_json, to_json
from jaxgpt.data import Mixture, Tokenizer, blend, load_tokenizer, open_mixture
from jaxgpt.data.files import STDLIB
from jaxgpt.data.tokenizer import NAMES
from jaxgpt.errors import UserError

LOCK = ".lock"
CONFIG = "config.json"
DATA = "data.json"
PARTIAL = ".partial"

CHANGEABLE = frozenset(
    {
        "mesh",
        "global_batch",
        "micro_batch",
        "recompute",
        "offload",
        "layout",
        "zero",
        "schedule",
        "schedule_file",
        "virtual_stages",
        "stages",
        "context_attention",
        "sequence_parallel",
        "steps",
        "log_every",
        "eval_every",
        "eval_tokens",
        "save_every",
        "keep",
        "keep_every",
        "resume",
    }
    | {"profile", "prompt", "non_finite", "spike", "watchdog"}
)
"""What a resumed run may be given anew: where and how fast the same numbers are computed, and what is told of them.

`steps` is among them though it moves the end of the learning rate's schedule: a run is lengthened on purpose, and is
told what follows. The order of samples does not depend on it; nor on `global_batch`, after which a run goes on with the
samples that come next.
"""

NAMES_OF_DATA = frozenset({"data", "tokenizer", "model.vocab"})
"""Fields whose values may differ as long as they lead to the same tokens: a corpus may have been moved. Where one of
two values of data is a blend, they may lead to other tokens, too: weights are given on purpose."""


def next_free(parent: Path, name: str) -> Path:
    """The first of `name`-1, `name`-2, ... in `parent` that is not there, made as an empty folder. Raises UserError."""
    number = 1
    while True:
        path = parent / f"{name}-{number}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _unusable(path, error) from None
        else:
            return path


@contextmanager
def hold(run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keeps the folder for this process, and makes it if it is not there; unless it becomes a run, it goes again.

    Raises UserError where another process has it, or where it is somebody else's folder: nothing is touched there.
    """
    _refuse_foreign(run)
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = (run / LOCK).open("a+")
    except OSError as error:
        raise _unusable(run, error) from None
    with lock:
        _lock(lock, run, say)
        _refuse_lost(lock, run)
        try:
            yield
        finally:
            if not (run / CONFIG).exists():
                # Removed only if nothing else has come into it.
                (run / LOCK).unlink(missing_ok=True)
                with suppress(OSError):
                    run.rmdir()


def read_config(run: Path) -> RunConfig | None:
    """The configuration of a run, or None where there is no run. Raises UserError where it cannot be read."""
    file = run / CONFIG
    try:
        return from_json(file.read_text(encoding="utf-8"), str(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unusable(file, error) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not a configuration of jaxgpt ({error})") from None


def stored_config(run: Path) -> RunConfig:
    """The configuration of a run that must be there. Raises UserError."""
    config = read_config(run)
    if config is None:
        raise UserError(
            f"{run}: is not the folder of a run (it has no {CONFIG}); give the one that train printed, or a model's"
        )
    return config


def merge(run: Path, config: RunConfig, stored: RunConfig, explicit: frozenset[str] | None) -> RunConfig:
    """What a resumed run is to be: the stored one, with what may be changed and was given (explicit None: all was).

    Raises UserError with the fields that may not be changed and differ, and for a run made shorter.
    """
    wanted = _full_paths(config)
    if wanted.dtype == "auto":
        # The stored one is what auto came to when the run began.
        wanted = dataclasses.replace(wanted, dtype=stored.dtype)
    if wanted.model.vocab == asked_vocabulary(run, stored, stored):
        wanted = dataclasses.replace(wanted, model=dataclasses.replace(wanted.model, vocab=stored.model.vocab))
    given = CHANGEABLE if explicit is None else CHANGEABLE & explicit
    moved = "mesh" in given and wanted.mesh != stored.mesh
    left = {name: getattr(stored, name) for name in CHANGEABLE - given}
    if moved:
        left |= uncut(given)
    wanted = dataclasses.replace(wanted, **left)
    refused = differences(wanted, stored, CHANGEABLE | NAMES_OF_DATA)
    if wanted.steps < stored.steps:
        refused.append(f"steps: {wanted.steps}, {stored.steps} (a run can only be made longer)")
    _refuse(refused)
    return wanted


def asked_vocabulary(run: Path, config: RunConfig, stored: RunConfig | None) -> int:
    """Entries to ask of a tokenizer. A run's tokens were made with what was asked then, its model has what came."""
    if stored is None or config.model.vocab != stored.model.vocab:
        return config.model.vocab
    return int((_read_data(run) or {}).get("asked_vocabulary", config.model.vocab))


def resolve(config: RunConfig, dataset: Mixture) -> RunConfig:
    """The configuration with what was left open: the vocabulary's real size, full paths."""
    if config.init_from:  # the model is there already, and may have more entries than its tokenizer
        return _full_paths(config)
    return dataclasses.replace(
        _full_paths(config), model=dataclasses.replace(config.model, vocab=dataset.tokenizer.size)
    )


def open_data(run: Path, config: RunConfig, stored: RunConfig | None, say: Callable[[str], None]) -> Mixture:
    """The run's data. A blend keeps the tokenizer that it has begun with, when its sources change."""
    asked = asked_vocabulary(run, config, stored)
    tokenizer: str | Tokenizer = config.tokenizer
    if stored is not None and _blended(config, stored) and config.tokenizer == stored.tokenizer:
        tokenizer = load_tokenizer(run / "tokenizer")
    return open_mixture(config.data, tokenizer, asked, config.validation, say=say)


def check_data(run: Path, config: RunConfig, stored: RunConfig, dataset: Mixture) -> None:
    """Raises UserError where a resumed run would read other tokens than before, and nobody has said that it may."""
    before = _read_data(run)
    if before is None or before["fingerprint"] == dataset.fingerprint:
        return
    if config.data != stored.data and _blended(config, stored):
        if dataset.tokenizer.fingerprint() == load_tokenizer(run / "tokenizer").fingerprint():
            return
        raise UserError(f"--data {config.data}: has another tokenizer than the run, {dataset.tokenizer.name}")
    _refuse(data_differences(config, stored))
    raise UserError(
        f"--data {config.data}: its text or tokenizer has changed since the run began; "
        "restore it, or begin another run with another --run"
    )


def data_differences(config: RunConfig, stored: RunConfig) -> list[str]:
    """The fields among NAMES_OF_DATA that differ, as config_file.differences has them."""
    return [one for one in differences(config, stored) if one.partition(":")[0] in NAMES_OF_DATA]


def data_fingerprint(run: Path) -> str | None:
    """Fingerprint of the data that a run reads; None where it is not written down yet."""
    record = _read_data(run)
    return None if record is None else str(record["fingerprint"])


def write(run: Path, config: RunConfig, asked: int, dataset: Mixture, beside: Mapping[str, bytes]) -> None:
    """Writes configuration, data and tokenizer; each is whole or absent. beside: files that belong beside the
    tokenizer. Raises UserError."""
    record = {"fingerprint": dataset.fingerprint, "asked_vocabulary": asked, "store": dataset.manifest}
    try:
        # What makes a folder a run comes first, and what a run is changed to last: cut off between, both can go on.
        if not (run / CONFIG).exists():
            replace(run / CONFIG, to_json(config).encode())
        if data_fingerprint(run) != dataset.fingerprint:
            replace(run / DATA, json.dumps(record, indent=1).encode())
        replace(run / CONFIG, to_json(config).encode())
        if not (run / "tokenizer").exists():
            partial = run / ("tokenizer" + PARTIAL)
            partial.mkdir(exist_ok=True)
            dataset.tokenizer.save(partial)
            for name, content in beside.items():
                (partial / name).write_bytes(content)
            partial.rename(run / "tokenizer")
        (run / "checkpoints").mkdir(exist_ok=True)
    except OSError as error:
        raise _unusable(run, error) from None


def replace(file: Path, content: bytes) -> None:
    """Writes a file so that it is the old or the new one, whole, at any moment."""
    partial = file.with_name(file.name + PARTIAL)
    with partial.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)


def _refuse_foreign(run: Path) -> None:
    try:
        others = {entry.name for entry in run.iterdir()} - {LOCK, CONFIG + PARTIAL}
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(run, error) from None
    if others and read_config(run) is None:
        raise UserError(
            f"--run {run}: is a folder of something else (it has {min(others)}, but no {CONFIG}); "
            "give a new or empty folder, or that of a run"
        )


def _lock(lock: IO[str], run: Path, say: Callable[[str], None]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read(64).strip()
        raise UserError(
            f"--run {run}: is in use by another process{f' ({holder})' if holder else ''}; wait for it, or end it"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise _unusable(run, error) from None
        say(f"{run}: its file system has no locks ({error.strerror}), so a second process in it would not be noticed")
    try:
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        lock.flush()
    except OSError as error:
        raise _unusable(run, error) from None


def _refuse_lost(lock: IO[str], run: Path) -> None:
    """Raises UserError where another process has removed the file between its opening and its locking: a third one
    would make it anew, and lock that."""
    try:
        there = os.path.samestat(os.fstat(lock.fileno()), (run / LOCK).stat())
    except FileNotFoundError:
        there = False
    if not there:
        raise UserError(f"--run {run}: another process has just ended in it; give the same command again")


def _refuse(fields: list[str]) -> None:
    if fields:
        raise UserError(
            f"the run has another configuration (given, stored): {'; '.join(fields)}; "
            "leave these flags out, or begin another run with another --run"
        )


def _read_data(run: Path) -> dict[str, Any] | None:
    file = run / DATA
    if not file.exists():
        return None
    try:
        record = json.loads(file.read_bytes())
        return {"fingerprint": record["fingerprint"], "asked_vocabulary": record["asked_vocabulary"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: is damaged ({error}); restore it") from None


def _full_paths(config: RunConfig) -> RunConfig:
    """A run is resumed from any working directory."""

    def full(text: str) -> str:
        return text if text in ("", STDLIB, *NAMES) else os.path.abspath(os.path.expanduser(text))

    parts = [dataclasses.replace(part, data=full(part.data)) for part in blend.parse(config.data)]
    data = blend.spell(parts) if blend.is_blend(config.data) else parts[0].data
    names = full(config.tokenizer), full(config.schedule_file), full(config.init_from)
    tokenizer, table, source = names
    return dataclasses.replace(config, data=data, tokenizer=tokenizer, schedule_file=table, init_from=source)


def _blended(config: RunConfig, stored: RunConfig) -> bool:
    return blend.is_blend(config.data) or blend.is_blend(stored.data)


def _unusable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be used ({error.strerror or error}); mend that, or give another --run")
