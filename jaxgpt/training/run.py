"""A run from its folder: begun or resumed, trained to its end or to a signal, and measured afterwards."""

import dataclasses
import shlex
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxgpt.config import RunConfig
from jaxgpt.data import Mixture, Tokenizer, open_text
from jaxgpt.errors import RESUMABLE, UserError, require
from jaxgpt.inference.sampling import Sampling
from jaxgpt.inference.text import write
from jaxgpt.interop import models
from jaxgpt.interop.places import is_model
from jaxgpt.planner.choose import auto
from jaxgpt.processes import together
from jaxgpt.sharding import mesh
from jaxgpt.training import checkpoint, curve, derived, faults, folder, history, metrics
from jaxgpt.training.console import Console
from jaxgpt.training.evaluation import Figures, measure
from jaxgpt.training.loop import Begin, Loop
from jaxgpt.training.opened import devices_for, open_trained
from jaxgpt.training.program import Program
from jaxgpt.training.resume import restore_last
from jaxgpt.training.retention import LAST

SAMPLE_TOKENS = 200
"""Tokens of the sample drawn at the end."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run: Path
    step: int
    """Steps trained."""
    validation: Figures | None
    """Over all validation tokens; None where a signal came first."""
    signal: int | None = None
    """The signal that ended it."""

    @property
    def status(self) -> int:
        """Exit status of a command: 0, or RESUMABLE after a signal."""
        return 0 if self.signal is None else RESUMABLE


def train(
    config: RunConfig, run: Path | None = None, explicit: frozenset[str] | None = None, name: str = "demo"
) -> Result:
    """Trains, or goes on where the run in the folder has stopped. Bit for bit the run that was never stopped.

    run: its folder; None: the next free one, runs/NAME-1 and so on. explicit: fields of `config` that were given on
    purpose; None: all of them. The others are taken from the stored run, as far as a resumed run may change them.
    Raises UserError: another configuration or other data than the run's, a folder that is in use or somebody
    else's, a mesh that does not fit, a disk that is full. What was saved before stays.
    """
    console = Console()
    run = Path(together.told("run", lambda: str(folder.next_free(Path("runs"), name) if run is None else run)))
    # Of several processes the first one alone holds the folder and writes into it.
    with folder.hold(run, console.fallback) if together.is_first() else nullcontext():
        together.wait("the run folder's lock")
        stored = folder.read_config(run)
        config = config if stored is None else _chosen_already(config, stored, console)
        wanted = config if stored is None else folder.merge(run, config, stored, explicit)
        if wanted.mesh != mesh.AUTO:
            mesh.devices_named(wanted.mesh)  # what is misspelt is said of a finished run, too
        known = stored is not None and not folder.data_differences(wanted, stored)
        if known and (finished := _finished(run, wanted, console)):
            return finished
        devices, sizes = devices_for(wanted, console)
        asked = folder.asked_vocabulary(run, wanted, stored)
        with together.first_alone("data", together.BUILD):
            dataset = folder.open_data(run, wanted, stored, console.say)
        resolved = folder.resolve(wanted, dataset)
        source = _source(run, resolved)
        if stored is not None:
            folder.check_data(run, resolved, stored, dataset)
            if finished := _finished(run, resolved, console):
                return finished
        dataset.check(resolved.model.seq)
        if resolved.mesh == mesh.AUTO:  # only now, when the vocabulary's real size is known
            resolved = auto(resolved, devices, explicit, console)
            sizes = mesh.parse(resolved.mesh)
        mesh.check(resolved, sizes)
        program = Program(resolved, mesh.build(sizes, devices))
        resolved = dataclasses.replace(resolved, dtype="bf16" if program.dtype == "bf16" else "fp32")
        together.wait("what the run folder holds is read")
        if together.is_first():
            _write(run, resolved, stored, asked, dataset, source)
        return _run(run, resolved, stored, program, dataset, console, source)


def _chosen_already(config: RunConfig, stored: RunConfig, console: Console) -> RunConfig:
    """The configuration with the stored run's mesh, where one is to be chosen and that one is for as many devices as
    there are: another would be no more the run bit for bit, and the trials were made when it began."""
    if config.mesh != mesh.AUTO or mesh.devices_named(stored.mesh) != len(mesh.prepare_devices(None)[0]):
        return config
    console.fallback(f"--mesh auto: the run's own stays, {stored.mesh}; give another --mesh to move it")
    return dataclasses.replace(config, mesh=stored.mesh)


def _write(
    run: Path, config: RunConfig, stored: RunConfig | None, asked: int, dataset: Mixture, source: models.Model | None
) -> None:
    """Writes what a run is and how it begins."""
    if stored is not None and (begun := folder.data_fingerprint(run)) is not None:
        history.first(run, stored, [(begun, 1)])  # of a run that began before there were blends
    folder.write(run, config, asked, dataset, {} if source is None else source.beside)
    history.first(run, config, history.shares(dataset))


def _source(run: Path, config: RunConfig) -> models.Model | None:
    """The model that a run begins with, where it has not begun and is to begin with one."""
    return None if checkpoint.steps(run / "checkpoints") else models.begun_with(config)


def evaluate(
    run: Path, data: str | None = None, mesh: str = "", step: str = LAST, stride: int | None = None
) -> Figures:
    """Loss, perplexity, bits per byte and tokens counted of a run's last checkpoint, or of a model of somebody else's,
    printed and returned.

    data: a text, read in full; None: the run's own validation part. mesh: any; empty: all devices on data. step:
    another checkpoint, as retention.find takes it. stride: of a sliding window; see evaluation.measure.
    """
    console = Console()
    trained = open_trained(run, mesh, console, step)
    seq = trained.config.model.seq
    require(stride is None or 1 <= stride <= seq, "--stride", stride, f"must be at least 1 and at most {seq}")
    if data is None and is_model(run):
        raise UserError(f"--data: is not given, and {run} is no run, which would have a text of its own")
    if data is None:
        config = trained.config
        dataset = folder.open_data(run, config, config, console.say)
        folder.check_data(run, config, config, dataset)
        tokens, size, text = dataset.validation, dataset.validation_bytes, "the run's validation part"
        documents = dataset.validation_documents
    else:
        if trained.tokenizer is None:
            raise UserError(f"{run}: has no tokenizer; put its tokenizer.json there")
        opened = open_text(data, trained.tokenizer)
        tokens, size, text = [opened.tokens], opened.bytes, opened.description
        documents = [opened.documents]
    found = measure(trained.program, trained.params, tokens, documents, size=size, stride=stride)
    if found is None:
        raise RuntimeError("an evaluation that nobody stops has stopped")
    console.table(f"{run}, step {trained.step}, on {text}", found.rows())
    return found


def _run(
    run: Path,
    config: RunConfig,
    stored: RunConfig | None,
    program: Program,
    dataset: Mixture,
    console: Console,
    source: models.Model | None,
) -> Result:
    if config.offload != "none" and program.platform == "cpu":
        console.fallback(f"--offload {config.offload}: on CPU all memory is the host's, so it changes nothing")
    begin = _begin(run, program, console, source)
    with together.first_alone("samples"):
        samples, dataset = history.resume(run, config, dataset, begin.step, console.say)
    begin = dataclasses.replace(begin, samples=samples)
    for title, rows in derived.tables(config, program, dataset):
        console.table(title, rows)
    peak, formula = derived.utilisation(config, program)
    console.say(formula)
    console.say(f"run: {run}" + ("" if begin.saved is None else f", resumed after step {begin.step}"))
    if stored is not None and config.steps != stored.steps:
        console.say(f"steps: {stored.steps} -> {config.steps}; the learning rate follows the longer schedule from here")
    if config.warmup >= config.steps:
        console.fallback(f"--warmup {config.warmup}: the learning rate only rises, in all {config.steps} steps")
    while True:
        with Loop(run, config, program, dataset, console, peak, begin) as loop:
            loop.train()
            ended = loop.stopped is not None or loop.rewind is not None
            figures = None if ended else loop.validate_all()
            loop.wait()
        if loop.rewind is None or loop.stopped is not None:
            break
        loop.state = {}  # before another takes its place on the devices
        begin, dataset = _back(run, config, program, dataset, console, source, loop.rewind)
    drawn = curve.draw(run) if together.is_first() else None
    if figures is not None:
        console.table(f"{run}, step {loop.done}, on the run's validation part", figures.rows())
        console.say(f"loss curve: {drawn}")
        _sample(run, program, loop.state["params"], dataset.tokenizer, console)
    else:
        console.say(f"stopped after step {loop.done}, which is saved; to resume: {_command(run)}")
    return Result(run, loop.done, figures, loop.stopped)


def _sample(run: Path, program: Program, params: dict[str, jax.Array], tokenizer: Tokenizer, console: Console) -> None:
    """Writes what the model makes of the run's prompt to `sample.txt`, and says it."""
    prompt, seq = program.config.prompt, program.config.model.seq
    try:
        tokens = tokenizer.encode(prompt).tolist()
    except UserError as error:
        console.fallback(f"no sample is drawn: {error}")
        return
    if not tokens:
        console.fallback("no sample is drawn, since --prompt is empty")
        return
    if len(tokens) > seq:
        console.fallback(f"no sample is drawn, since --prompt has {len(tokens)} tokens and the context {seq}")
        return
    together.wait("the sample")
    sampling = Sampling(seed=program.config.seed)
    rounds = write(program.decoding(params), tokenizer, [tokens], seq, SAMPLE_TOKENS, sampling)
    text = prompt + "".join(piece for (piece,) in rounds)
    file = run / "sample.txt"
    if not together.is_first():
        return
    try:
        folder.replace(file, text.encode())
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror or error})") from None
    console.say(f"sample, in {file}:\n{text}")


def _finished(run: Path, config: RunConfig, console: Console) -> Result | None:
    """What a run came to that has nothing left to do; else None."""
    if config.steps not in checkpoint.steps(run / "checkpoints"):
        return None
    for record in metrics.read(run):
        if record["step"] == config.steps and record.get("complete"):
            found = Figures(record["loss"], record["tokens"], record.get("bits_per_byte"))
            console.say(
                f"{run}: trained to its last step {config.steps}, validation loss {found.loss:.4f}; "
                f"to train further: {_command(run)} --steps {2 * config.steps}; for text: jaxgpt sample {run}"
            )
            return Result(run, config.steps, found)
    return None


def _begin(run: Path, program: Program, console: Console, source: models.Model | None) -> Begin:
    checkpoints = run / "checkpoints"
    if together.is_first():
        checkpoint.clear_partial(checkpoints)
    together.wait("what was half written is removed")
    strict = program.config.resume == "strict"
    say, targets = console.fallback, program.targets()
    restored = restore_last(checkpoints, targets, program.logical, say, program.rows, strict=strict)
    if restored is None and source is not None:
        console.say(f"parameters: from {source.path}")
        return Begin(program.begin_with(source.onto(program.table, program.shardings)), 0, None)
    if restored is None:
        return Begin(program.init(), 0, None)
    together.wait("the last checkpoint is read")
    for step in restored.damaged if together.is_first() else ():
        kept = checkpoint.set_aside(checkpoints, step)
        console.fallback(f"the damaged checkpoint of step {step} is kept as {kept}")
    return Begin(restored.state, restored.step, restored.step)


def _back(
    run: Path,
    config: RunConfig,
    program: Program,
    dataset: Mixture,
    console: Console,
    source: models.Model | None,
    rewind: faults.Rewind,
) -> tuple[Begin, Mixture]:
    """The last checkpoint, or the start where there is none, and the samples to go on with, which is written down."""
    begin = _begin(run, program, console, source)
    before = together.told("rewinds", lambda: history.rewinds(run, begin.step))
    if before >= rewind.most:
        raise UserError(f"{rewind.why}; the run has come back to step {begin.step} {before} times; {faults.CURE}")
    if together.is_first():
        history.rewind(run, config, dataset, begin.step, rewind.samples)
    with together.first_alone("samples"):
        samples, dataset = history.resume(run, config, dataset, begin.step, console.say)
    console.fallback(
        f"back to step {begin.step}; goes on after the {samples:,} samples up to step {rewind.step}, "
        f"which are left out ({before + 1} of at most {rewind.most} times)"
    )
    return dataclasses.replace(begin, samples=samples), dataset


def _command(run: Path) -> str:
    return f"jaxgpt train --run {shlex.quote(str(run))}"
