"""The command line: each verb calls one function with one dataclass. JAX is imported only to do the work."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path

from jaxgpt import flags
from jaxgpt.arguments import parse, verb_of
from jaxgpt.configured import configured
from jaxgpt.errors import UserError, require, told_of
from jaxgpt.processes.launch import launch
from jaxgpt.training.signals import StopSignals, end_resumable

HELP = """usage: jaxgpt VERB [flags]

  train       train a GPT on a mesh of devices, or resume a run
  eval        loss, perplexity and bits per byte of a run or a model
  sample      text that a run or a model writes
  export      a run or a model as a Hugging Face folder
  check       one device against a mesh, array by array; takes train's flags
  data        prepare, inspect or blend what is trained on
  checkpoint  list, inspect, verify or export the checkpoints of a run
  explain     where all lies on a mesh, what is kept and what is sent, without devices; takes train's flags
  plan        the fastest meshes for hardware that need not be there, with time and memory; takes train's flags

jaxgpt VERB --help lists a verb's flags with their defaults; for train, check, explain and plan, those of --preset, of
the run in --run or of the plan in --plan."""


def train(args: list[str]) -> int:
    """Trains or resumes; as one of several processes, if it was started so."""
    with StopSignals(end_resumable), _joined(args):
        told = configured("train", flags.LaunchFlags, args)

        from jaxgpt.training import run as runs

        return runs.train(told.config, told.flags.run, told.explicit, told.name).status


def _joined(args: list[str]) -> AbstractContextManager[None]:
    """Within it, this process is among its peers, if it has some; so that what is wrong is said once by all."""
    found = None if {"-h", "--help"} & set(args) else launch(args)
    if found is None:
        return nullcontext()

    from jaxgpt.processes.together import Joined

    return Joined(found)


def plan(args: list[str]) -> int:
    """Ranks plans for hardware that need not be there; 1 where --verify finds that the first does not fit."""
    told = configured("plan", flags.PlanFlags, args)
    _refuse_unwritable("--picture", told.flags.picture, ".png")
    _refuse_unwritable("--save", told.flags.save)
    if told.flags.hardware is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # as in explain

    from jaxgpt import planning

    return planning.plan(told.config, told.flags, told.explicit)


def explain(args: list[str]) -> int:
    """Says where everything lies on a mesh, what is kept and what is sent."""
    told = configured("explain", flags.ExplainFlags, args)
    chosen = told.flags
    # Nothing is run on a device, and the GPUs' own start would ask for a driver.
    os.environ["JAX_PLATFORMS"] = "cpu"

    from jaxgpt import explained

    _refuse_unwritable("--picture", chosen.picture, ".png")
    found = explained.explain(told.config, chosen.compiled)
    if chosen.picture is not None:
        if found.pipeline is None:
            raise UserError(f"--picture {chosen.picture}: one stage has no schedule to draw; give --mesh a pipe axis")
        found.pipeline.draw(chosen.picture)
    if chosen.json:
        print(explained.to_json(found))
    else:
        explained.print_tables(found)
    return 0


def evaluate(args: list[str]) -> int:
    """Measures a run on text."""
    chosen = parse("eval", flags.EvalFlags, args)

    from jaxgpt.training import run as runs

    runs.evaluate(chosen.run, chosen.data, chosen.mesh, chosen.step, chosen.stride)
    return 0


def sample(args: list[str]) -> int:
    """Writes text with a run."""
    chosen = parse("sample", flags.SampleFlags, args)
    require(chosen.tokens >= 1, "--tokens", chosen.tokens, "must be at least 1")

    import jaxgpt

    run = jaxgpt.load(chosen.run, chosen.mesh, chosen.step)
    prompt = run.config.prompt if chosen.prompt is None else chosen.prompt
    pieces = run.stream(
        prompt,
        chosen.tokens,
        temperature=chosen.temperature,
        top_k=chosen.top_k,
        top_p=chosen.top_p,
        repetition_penalty=chosen.repetition_penalty,
        stop=[] if chosen.stop is None else [chosen.stop],
        seed=chosen.seed,
    )
    shown = prompt.encode("utf-8", "replace").decode()  # a command line may hold bytes that are no UTF-8
    try:
        for piece in chain([shown], pieces):
            print(piece, end="", flush=True)
        print()
    except BrokenPipeError:  # who reads it has read enough, as head has; Python's own last flush would still say so
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def export(args: list[str]) -> int:
    """Writes a run or a model as a Hugging Face folder."""
    chosen = parse("export", flags.ExportFlags, args)

    import jaxgpt
    from jaxgpt.interop.export import refuse_taken

    refuse_taken(chosen.out)
    jaxgpt.load(chosen.run, chosen.mesh, chosen.step).export(chosen.out, chosen.dtype)
    print(f"{chosen.out}: {', '.join(sorted(file.name for file in chosen.out.iterdir()))}")
    return 0


def check(args: list[str]) -> int:
    """Compares the first steps of what train would do on one device and on the mesh; 1 where they differ."""
    with _joined(args):
        told = configured("check", flags.LaunchFlags, args)

        from jaxgpt.training import check as checks

        return checks.check(told.config, told.flags.run, told.explicit).status


def data(args: list[str]) -> int:
    """Prepares, inspects or blends data."""
    from jaxgpt import data_verbs

    return data_verbs.main(args)


def checkpoints(args: list[str]) -> int:
    """Lists, inspects, verifies or exports checkpoints; 1 where verify finds damage."""
    from jaxgpt import checkpoint_verbs

    return checkpoint_verbs.main(args)


def _refuse_unwritable(flag: str, file: Path | None, suffix: str = "") -> None:
    """Refuses, before anything is computed, a file that would be overwritten or could not be written."""
    if file is not None:
        require(file.suffix == suffix or not suffix, flag, file, f"must end in {suffix}")
        require(not file.exists(), flag, file, "is there already", "give another name")
        require(file.parent.is_dir(), flag, file, "must be in a folder that is there")


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "eval": evaluate,
    "sample": sample,
    "export": export,
    "check": check,
    "data": data,
    "checkpoint": checkpoints,
    "explain": explain,
    "plan": plan,
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0, 1 where a check finds a difference, 2 for what the user
    must mend, 75 after a signal that a run was saved for, or where another process of the run is gone, 69 where the
    watchdog ended it, 128 + n where signal n did at once."""
    try:
        found = verb_of(VERBS, sys.argv[1:] if args is None else args, HELP)
        return 0 if found is None else found[0](found[2])
    except (UserError, KeyboardInterrupt, OSError) as error:
        if (told := told_of(error)) is None:
            raise
        return _fail(*told)


def _fail(message: str, status: int) -> int:
    print(f"jaxgpt: error: {' '.join(message.split())}", file=sys.stderr)
    return status
