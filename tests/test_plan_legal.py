"""The plans that a search looks at: all that train's checks allow, and none that they refuse."""

import dataclasses
import itertools

import pytest
from tiny import GPT, LLAMA, run_config

from jaxgpt.config import RunConfig
from jaxgpt.planner.estimate import estimate
from jaxgpt.planner.hardware import find
from jaxgpt.planner.legal import FREE, Space
from jaxgpt.planner.plan import Plan
from jaxgpt.sharding import mesh

SIX_LAYERS = dataclasses.replace(GPT, layers=6)
CASES = {
    "gpt": (run_config(SIX_LAYERS, global_batch=4), 8),
    "few key-value heads": (run_config(LLAMA, global_batch=2), 8),
    "odd batch": (run_config(SIX_LAYERS, global_batch=6), 6),
    "rows by hand": (run_config(LLAMA, global_batch=2, layout="embed=data,mlp=none"), 4),
    "uneven parts": (run_config(SIX_LAYERS, global_batch=2, stages="2,4"), 4),
    "ring": (run_config(SIX_LAYERS, global_batch=2, context_attention="ring"), 4),
}


def key(plan: Plan) -> tuple[object, ...]:
    split = plan.zero, plan.sequence_parallel
    return mesh.format_mesh(plan.sizes), plan.schedule, plan.virtual_stages, plan.micro_batch, *split


def allowed(config: RunConfig, devices: int) -> set[tuple[object, ...]]:
    """By train's own check, every combination tried."""
    found = set()
    batches = range(1, config.global_batch + 1)
    orders = [("1f1b", 1), ("zero-bubble", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3)]
    every = mesh.factorisations(devices)
    for (name, chunks), micro, zero, seq in itertools.product(orders, batches, range(4), (False, True)):
        chosen = {"schedule": name, "virtual_stages": chunks, "micro_batch": micro}
        each = dataclasses.replace(config, **chosen, zero=zero, sequence_parallel=seq)
        legal = (sizes for sizes in every if mesh.allows(each, sizes))
        found |= {(mesh.format_mesh(sizes), name, chunks, micro, zero, seq) for sizes in legal}
    return found


def left_out(each: tuple[object, ...], layers: int) -> bool:
    """What the space says that it leaves out, since another plan is never worse."""
    text, name, chunks, _, zero, seq = each
    sizes = mesh.parse(text)
    stages = sizes["pipe"]
    longest = -(-layers // (stages * chunks))
    needless = any(-(-layers // (stages * fewer)) == longest for fewer in range(1, chunks))
    nothing = (seq and sizes["tensor"] == 1) or (zero and sizes["data"] == 1) or (stages == 1 and name != "1f1b")
    return nothing or needless


@pytest.mark.parametrize("name", CASES)
def test_the_space_is_what_train_allows(name):
    config, devices = CASES[name]
    space = Space(config, devices, "h100", frozenset(FREE))
    found = [plan for sizes in space.meshes() for plan in space.plans(sizes)]
    assert len(set(found)) == len(found) > 0
    ours, theirs = {key(plan) for plan in found}, allowed(config, devices)
    assert ours <= theirs
    assert {each for each in theirs if not left_out(each, config.model.layers)} <= ours
    alike: dict[tuple[object, ...], list[Plan]] = {}
    for plan in found:
        alike.setdefault(key(plan), []).append(plan)
    for plan, *others in alike.values():  # what they differ in is no mesh's to refuse
        mesh.check(plan.apply(config), plan.sizes)
        longest = plan.longest(config.model.layers)
        counts = {f"{kind}:{n}" for kind in ("selective", "full") for n in range(1, longest)}
        assert {each.recompute for each in (plan, *others)} == {"none", "selective", "full"} | counts


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": "pipe=2,tensor=2,data=2"},
        {"mesh": "data=-1,tensor=2"},
        {"micro_batch": 2},
        {"schedule": "gpipe"},
        {"schedule": "interleaved", "virtual_stages": 3},
        {"virtual_stages": 1},
        {"zero": 3},
        {"recompute": "selective", "sequence_parallel": True},
    ],
)
def test_what_is_pinned_stays(fields):
    config = run_config(SIX_LAYERS, global_batch=8, **fields)
    space = Space(config, 8, "h100", frozenset(FREE) - frozenset(fields))
    plans = [plan for sizes in space.meshes() for plan in space.plans(sizes)]
    assert plans
    sizes = mesh.parse(fields["mesh"], 8) if "mesh" in fields else None
    for plan in plans:
        assert sizes in (None, plan.sizes)
        assert all(getattr(plan, name) == value for name, value in fields.items() if name != "mesh")
        mesh.check(plan.apply(config), plan.sizes)


def test_where_all_is_pinned_one_plan_is_left_and_it_is_the_configurations():
    config = run_config(SIX_LAYERS, mesh="pipe=2,data=2", zero=1, recompute="full", global_batch=8)
    space = Space(config, 4, "h100", frozenset())
    (plan,) = (plan for sizes in space.meshes() for plan in space.plans(sizes))
    assert plan == Plan.of(config, mesh.parse(config.mesh), "h100")
    none = Space(dataclasses.replace(config, schedule="interleaved"), 4, "h100", frozenset())
    assert list(none.meshes()) == []


def test_what_is_left_out_is_never_better():
    """GPipe, and chunks beyond the fewest for a length of the longest part."""
    config = run_config(dataclasses.replace(GPT, layers=48, width=256), global_batch=64)
    hardware = find("h100")

    def of(**fields: object) -> tuple[float, int]:
        plan = Plan(pipe=4, data=2, micro_batch=1, **fields)
        found = estimate(config.model, plan, hardware, config.global_batch)
        return found.step_seconds, found.peak_bytes

    assert of() == min(of(), of(schedule="gpipe"))
    assert of()[1] <= of(schedule="gpipe")[1]
    chunks = [of(schedule="interleaved", virtual_stages=v) for v in (6, 7, 8, 9)]  # of two layers at most
    assert chunks == sorted(chunks)
    for kind in ("selective", "full"):
        counts = [f"{kind}:{n}" for n in range(1, 12)]
        again = [of(recompute=each) for each in ("none", *counts, kind)]
        assert again == sorted(again, key=lambda each: each[0])
        assert again[:-1] == sorted(again[:-1], key=lambda each: -each[1])
    again = [of(recompute=each) for each in ("none", "selective", "full")]
    assert [each[0] for each in again] == sorted(each[0] for each in again)
    assert [each[1] for each in again] == sorted((each[1] for each in again), reverse=True)
