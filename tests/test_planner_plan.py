"""Plans as values: to and from a run's configuration, to and from a file."""

import dataclasses
import json

import pytest

from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.errors import UserError
from jaxgpt.planner.estimate import estimate
from jaxgpt.planner.hardware import find
from jaxgpt.planner.plan import Plan
from jaxgpt.sharding.mesh import parse

PLAN = Plan(pipe=2, data=2, tensor=2, micro_batch=2, schedule="interleaved", virtual_stages=2, zero=1, hardware="h200")
MODEL = ModelConfig(layers=8, width=256, heads=8, vocab=1000, seq=128)


def test_plan_and_configuration_say_the_same():
    config = PLAN.apply(RunConfig(model=MODEL, global_batch=32))
    assert (config.mesh, config.zero, config.micro_batch) == ("pipe=2,data=2,tensor=2", 1, 2)
    assert Plan.of(config, parse(config.mesh), "h200") == PLAN


def test_open_choices_are_what_the_run_takes():
    plan = Plan.of(RunConfig(model=MODEL, global_batch=32), parse("data=4,context=2"), "h100")
    assert (plan.micro_batch, plan.context_attention, plan.microbatches(32)) == (8, "ring", 1)
    in_a_pipeline = Plan.of(RunConfig(model=MODEL, global_batch=32), parse("pipe=2,context=2"), "h100")
    assert in_a_pipeline.context_attention == "gather"


def test_plan_goes_through_a_file():
    found = estimate(MODEL, PLAN, find("h200"), 32)
    assert Plan.from_json(json.loads(json.dumps(found.to_json())), "plan.json") == PLAN


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("zero", 4, "plan.json: zero 4: must be one of 0, 1, 2, 3"),
        ("micro_batch", "2", 'plan.json: micro_batch "2": must be a whole number'),
        ("mesh", "pipes=2", "plan.json: --mesh pipes=2"),
        ("mesh", 8, "plan.json: mesh 8: must be a text"),
        ("schedule", None, "plan.json: not a plan of jaxgpt"),
    ],
)
def test_broken_plan_is_refused(field, value, said):
    fields = PLAN.to_json() | {field: value}
    if value is None:
        del fields[field]
    with pytest.raises(UserError, match=said):
        Plan.from_json(fields, "plan.json")


def test_estimate_adds_up():
    found = estimate(MODEL, PLAN, find("h200"), 32)
    time, memory = found.to_json()["time"], found.to_json()["memory"]
    assert sum(time.values()) == pytest.approx(found.step_seconds)
    assert sum(memory.values()) == found.peak_bytes
    assert found.tokens_per_second == pytest.approx(32 * 128 / found.step_seconds)
    assert found.hfu == found.mfu  # nothing is recomputed
    again = estimate(MODEL, dataclasses.replace(PLAN, recompute="full"), find("h200"), 32)
    assert again.hfu > again.mfu
    assert again.memory.activations < found.memory.activations
    assert again.time.computation > found.time.computation
