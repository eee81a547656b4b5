"""What a ranking says: as tables, as JSON, and as a picture of memory and time."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxgpt.model.parameters import parameter_count
from jaxgpt.pipeline.picture import save
from jaxgpt.planner.memory import MARGIN
from jaxgpt.planner.plan import Estimate
from jaxgpt.planner.search import Ranking
from jaxgpt.training.console import Rows, size

TIE = 1e-3
"""Two plans whose steps differ by a smaller share are told as equally fast: no prediction is so near."""
GIB = 2**30
FORMULA = (
    "MFU = model FLOPs / (time x peak x devices); HFU counts what is computed again, too; causal attention by half"
)
RATES = "TFLOP/s of a device as in MFU, hardware as in HFU"


def parts(estimate: Estimate) -> dict[str, float]:
    """Seconds of a step by part; they add up to it."""
    time = estimate.time
    exposed = {f"{axis} exposed": seconds for axis, seconds in time.exposed.items()}
    after = {"bubble": time.bubble, "optimizer": time.optimizer, "offload": time.offload}
    return {"computation": time.computation, **exposed, **after}


def why(estimate: Estimate, first: Estimate) -> str:
    """Why a plan stands behind the first: what takes longer and what is quicker, or how a tie was decided."""
    if estimate.fits != first.fits:
        return f"does not fit: {size(estimate.peak_bytes)} of {size(estimate.capacity)}"
    longer = estimate.step_seconds - first.step_seconds
    if abs(longer) <= TIE * first.step_seconds:
        more = estimate.peak_bytes - first.peak_bytes
        return f"as fast, within {TIE:.1%}; memory {'+' if more >= 0 else '-'}{size(abs(more))}"
    ours, theirs = parts(estimate), parts(first)
    change = {name: ours.get(name, 0.0) - theirs.get(name, 0.0) for name in ours | theirs}
    told = sorted((name for name in change if abs(change[name]) >= 0.1 * longer), key=lambda name: -change[name])
    said = [f"{name} {_signed(change[name])}" for name in told]
    rest = longer - sum(change[name] for name in told)
    if abs(rest) >= 0.1 * longer:  # so that what is told adds up
        said.append(f"the rest {_signed(rest)}")
    return f"{longer / first.step_seconds:+.1%}: " + ", ".join(said)


def choices(estimate: Estimate) -> str:
    """What a plan chose beside its mesh, in words."""
    plan = estimate.plan
    count = plan.microbatches(estimate.global_batch)
    cut = f" x {plan.virtual_stages}" if plan.virtual_stages > 1 else ""
    said = [f"{count} microbatch{'' if count == 1 else 'es'} of {plan.micro_batch}"]
    said += [f"{plan.schedule}{cut}"] if plan.pipe > 1 else []
    said += [f"zero {plan.zero}"] if plan.zero else []
    said += ["sequence parallel"] if plan.sequence_parallel else []
    said += [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    said += [f"offload {plan.offload}, {size(estimate.host_bytes)}"] if plan.offload != "none" else []
    return ", ".join(said)


# Tables


def tables(found: Ranking, tokens: float) -> list[tuple[str, Rows]]:
    """Title and rows of each table, each with a row of headings. tokens: of the whole training."""
    if not found.plans:
        return [("what is planned", _subject(found, tokens))]
    room = f"{size(found.plans[0].capacity)}; {MARGIN:.0%} more must fit"
    return [
        ("what is planned", _subject(found, tokens)),
        (f"plans, the fastest first; {RATES}; {FORMULA}", _ranks(found, tokens)),
        (f"memory of the fullest device, of {room}", _memory(found.plans)),
        ("time of a step, ms", _time(found.plans)),
        ("why the others stand behind the first", _reasons(found)),
    ]


def _subject(found: Ranking, tokens: float) -> Rows:
    config, model = found.space.config, found.space.config.model
    heads = f"{model.heads} heads" + (f", {model.kv} of them for keys and values" if model.kv < model.heads else "")
    shape = f"{model.layers} layers of width {model.width}, {heads}, vocabulary {model.vocab}"
    in_step = config.global_batch * model.seq
    return [
        ("model", f"{parameter_count(model):,} parameters: {shape}"),
        ("devices", f"{found.space.devices} x {found.space.hardware}"),
        ("a step", f"{config.global_batch:,} sequences of {model.seq:,}, {in_step:,} tokens"),
        ("training", f"{tokens:.4g} tokens, {math.ceil(tokens / in_step):,} steps"),
        (
            "searched",
            f"{found.meshes:,} legal meshes with {found.legal:,} plans; found by {found.predicted:,} predictions",
        ),
    ]


def _ranks(found: Ranking, tokens: float) -> Rows:
    head = ("", "mesh", "step", "tokens/s", "TFLOP/s", "hardware", "MFU", "HFU", "memory", "days", "chosen")
    return [head, *(_rank(place, each, tokens) for place, each in enumerate(found.plans, 1))]


def _rank(place: int, each: Estimate, tokens: float) -> tuple[str, ...]:
    return (
        str(place),
        each.to_json()["mesh"],
        _seconds(each.step_seconds),
        f"{each.tokens_per_second:,.0f}",
        f"{each.model_tflops:.4g}",
        f"{each.hardware_tflops:.4g}",
        f"{each.mfu:.1%}",
        f"{each.hfu:.1%}",
        size(each.peak_bytes) + ("" if each.fits else " DOES NOT FIT"),
        f"{each.days(tokens):.3g}",
        choices(each),
    )


def _memory(plans: list[Estimate]) -> Rows:
    kinds = list(dataclasses.asdict(plans[0].memory))
    rows = [(str(n), *(size(v) for v in dataclasses.astuple(each.memory))) for n, each in enumerate(plans, 1)]
    return [("", *kinds), *rows]


def _time(plans: list[Estimate]) -> Rows:
    """Parts that no plan has are left out."""
    of = [parts(each) for each in plans]
    least = 1e-6 * plans[0].step_seconds  # what is less is rounding
    names = [n for n in dict.fromkeys(name for each in of for name in each) if any(p.get(n, 0.0) > least for p in of)]
    rows = [(str(n), *(_milliseconds(each.get(name, 0.0)) for name in names)) for n, each in enumerate(of, 1)]
    return [("", *names), *rows]


def _reasons(found: Ranking) -> Rows:
    first, *others = found.plans
    rows = [(str(n), why(each, first)) for n, each in enumerate(others, 2)]
    if found.too_large is not None:
        lost = found.too_large
        need = f"{size(lost.peak_bytes)} of {size(lost.capacity)}"
        named = f"{lost.to_json()['mesh']}, {choices(lost)}"
        rows.append(("-", f"{named}: {_seconds(lost.step_seconds)} a step, but does not fit: {need}"))
    return rows or [("", "there is no other")]


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}"


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + _seconds(abs(seconds))


# JSON


def document(found: Ranking, tokens: float) -> dict[str, Any]:
    """The same as numbers, in bytes and seconds."""
    config = found.space.config
    return {
        "model": dataclasses.asdict(config.model),
        "parameters": parameter_count(config.model),
        "devices": found.space.devices,
        "hardware": found.space.hardware,
        "global_batch": config.global_batch,
        "tokens": tokens,
        "formula": FORMULA,
        "searched": {"meshes": found.meshes, "plans": found.legal, "predicted": found.predicted},
        "plans": [
            each.to_json() | {"days": each.days(tokens), "why": "" if n == 0 else why(each, found.plans[0])}
            for n, each in enumerate(found.plans)
        ],
        "faster_but_too_large": None if found.too_large is None else found.too_large.to_json(),
    }


# Picture


def draw(found: Ranking, path: Path) -> None:
    """Time of a step by part and memory by kind, a bar for each plan, as a PNG. Raises UserError where it cannot be
    written, or there is a file already."""
    plans = found.plans
    figure = Figure(figsize=(13, 1.8 + 0.5 * len(plans)), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    labels = [f"{each.to_json()['mesh']}\n{choices(each)}" for each in plans]
    _bars(left, [{n: 1e3 * s for n, s in parts(each).items()} for each in plans])
    left.set_yticks(range(len(plans)), labels, fontsize="x-small")
    left.set_ylim(len(plans) - 0.5, -0.5)  # the first on top
    left.set_xlabel("time of a step, ms")
    _bars(right, [{n: b / GIB for n, b in dataclasses.asdict(each.memory).items()} for each in plans])
    right.axvline(plans[0].capacity / GIB, color="black", linestyle="--", label="capacity")
    right.set_xlabel("memory of the fullest device, GiB")
    for axes in (left, right):
        axes.legend(fontsize="x-small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    figure.suptitle(f"{found.space.devices} x {found.space.hardware}", fontsize="medium")
    save(figure, path)


def _bars(axes: Axes, values: list[Mapping[str, float]]) -> None:
    names = [n for n in dict.fromkeys(n for each in values for n in each) if any(each.get(n) for each in values)]
    start = [0.0] * len(values)
    for name in names:
        wide = [each.get(name, 0.0) for each in values]
        axes.barh(range(len(wide)), wide, left=start, label=name)
        start = [a + b for a, b in zip(start, wide, strict=True)]
