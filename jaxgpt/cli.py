"""The command line: each verb calls one function with one dataclass. JAX is imported only to do the work."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from jaxgpt import flags, presets
from jaxgpt.arguments import given, nearest, parse
from jaxgpt.config import RunConfig, uncut
from jaxgpt.errors import UserError, require

HELP = """usage: jaxgpt VERB [flags]

  train     train a GPT on a mesh of devices, or resume a run
  eval      loss, perplexity and bits per byte of a run
  sample    text that a run writes
  check     one device against a mesh, array by array; takes train's flags
  data      prepare, inspect or blend what is trained on
  explain   where all lies on a mesh, what is kept and what is sent, without devices; takes train's flags

jaxgpt VERB --help lists a verb's flags with their defaults; for train, check and explain, those of --preset or of the
run in --run."""

REFUSED_BY_SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR)
"""What the operating system says of a disk or folder that the user must mend."""


F = TypeVar("F", bound=flags.TrainFlags)


def configured(verb: str, kind: type[F], args: list[str]) -> tuple[RunConfig, F, frozenset[str], str]:
    """What a verb with train's flags is told: the configuration, all flags, those of train's that were given, and the
    name of the preset. Flags that are not given come from the run that --run names, if it exists, or --preset."""
    texts = given(verb, kind, args)
    run, preset = texts.get("run"), texts.get("preset")
    stored = Path(run) / "config.json" if run and preset is None else None
    preset = preset or "demo"
    base = presets.stored(stored) if stored and stored.is_file() else presets.preset(preset)
    chosen = parse(verb, kind, args, flags.defaults(kind, base, preset, Path(run) if run else None))
    explicit = {field.name for field in fields(flags.TrainFlags)} & set(texts) - {"preset", "run"}
    if stored and "mesh" in explicit and chosen.mesh != base.mesh:
        base = replace(base, **uncut(explicit))
    config = flags.override(base, {field: getattr(chosen, field) for field in explicit})
    return config, chosen, frozenset(explicit), Path(preset).name.removesuffix(".json")


def train(args: list[str]) -> int:
    """Trains or resumes."""
    config, chosen, explicit, name = configured("train", flags.TrainFlags, args)

    from jaxgpt.training import run as runs

    return runs.train(config, chosen.run, explicit, name).status


def explain(args: list[str]) -> int:
    """Says where everything lies on a mesh, what is kept and what is sent."""
    config, chosen, _, _ = configured("explain", flags.ExplainFlags, args)
    # Nothing is run on a device, and the GPUs' own start would ask for a driver.
    os.environ["JAX_PLATFORMS"] = "cpu"

    from jaxgpt import explain as explaining

    require(chosen.picture is None or not chosen.picture.exists(), "--picture", chosen.picture, "is there already")
    found = explaining.explain(config, chosen.compiled)
    if chosen.picture is not None:
        if found.pipeline is None:
            raise UserError(f"--picture {chosen.picture}: one stage has no schedule to draw; give --mesh a pipe axis")
        found.pipeline.draw(chosen.picture)
    if chosen.json:
        print(explaining.to_json(found))
    else:
        explaining.print_tables(found)
    return 0


def evaluate(args: list[str]) -> int:
    """Measures a run on text."""
    chosen = parse("eval", flags.EvalFlags, args)

    from jaxgpt.training import run as runs

    runs.evaluate(chosen.run, chosen.data, chosen.mesh)
    return 0


def sample(args: list[str]) -> int:
    """Writes text with a run."""
    chosen = parse("sample", flags.SampleFlags, args)
    require(chosen.tokens >= 1, "--tokens", chosen.tokens, "must be at least 1")

    import jaxgpt

    run = jaxgpt.load(chosen.run, chosen.mesh)
    prompt = run.config.prompt if chosen.prompt is None else chosen.prompt
    print(f"{prompt}{run.generate(prompt, chosen.tokens, chosen.temperature, chosen.seed)}")
    return 0


def check(args: list[str]) -> int:
    """Compares the first steps of what train would do on one device and on the mesh; 1 where they differ."""
    config, chosen, explicit, _ = configured("check", flags.TrainFlags, args)

    from jaxgpt.training import check as checks

    return checks.check(config, chosen.run, explicit).status


def data(args: list[str]) -> int:
    """Prepares, inspects or blends data."""
    from jaxgpt import data_verbs

    return data_verbs.main(args)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "eval": evaluate,
    "sample": sample,
    "check": check,
    "data": data,
    "explain": explain,
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0, 1 where a check finds a difference, 2 for what the user
    must mend, 128 + n for signal n."""
    verb, *rest = list(sys.argv[1:] if args is None else args) or ["--help"]
    try:
        if verb in ("-h", "--help"):
            print(HELP)
            return 0
        if verb not in VERBS:
            raise UserError(f"{verb}: no such verb; {nearest(verb, VERBS)}known are {', '.join(VERBS)}")
        return VERBS[verb](rest)
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except OSError as error:
        if error.errno not in REFUSED_BY_SYSTEM:
            raise
        return _fail(f"{error.filename or 'disk'}: {error.strerror or os.strerror(error.errno)}")


def _fail(message: str, status: int = 2) -> int:
    print(f"jaxgpt: error: {' '.join(message.split())}", file=sys.stderr)
    return status
