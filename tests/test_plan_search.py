"""The search: what looking at every plan finds; the same each time; and what it says where there is none."""

import dataclasses

import pytest

from jaxgpt.errors import UserError
from jaxgpt.planner.choose import search
from jaxgpt.planner.estimate import estimate
from jaxgpt.planner.hardware import find
from jaxgpt.planner.legal import FREE, Space
from jaxgpt.planner.plan import Estimate, Plan
from jaxgpt.planner.search import Ranking, dtype_of, rank, smallest
from jaxgpt.presets import preset
from jaxgpt.sharding import mesh


def space(
    name: str, hardware: str, devices: int, pinned: frozenset[str] = frozenset(), layers: int = 0, **fields: object
) -> Space:
    """layers: of the model, in place of its own, since each is one more that a plan can compute again."""
    base = preset(name)
    model = dataclasses.replace(base.model, layers=layers or base.model.layers)
    config = dataclasses.replace(base, model=model, **fields)
    return Space(config, devices, hardware, frozenset(FREE) - pinned)


def every(of: Space) -> list[Estimate]:
    """All plans predicted."""
    config, hardware = of.config, find(of.hardware)
    dtype = dtype_of(config, hardware)
    plans = [plan for sizes in of.meshes() for plan in of.plans(sizes)]
    return [estimate(config.model, plan, hardware, config.global_batch, dtype=dtype) for plan in plans]


CASES = {
    "room enough": space("gpt2-355m", "h100", 4, layers=4, global_batch=8),
    "little room": space("gpt3-6.7b", "v100-16gb", 4, layers=8, global_batch=4),
    "two hosts": space(
        "gpt3-2.7b", "v100-16gb", 12, frozenset({"micro_batch"}), layers=6, global_batch=12, micro_batch=1
    ),
    "on CPU": space("demo", "cpu", 4, global_batch=4),
    "one device": space("gpt2-124m", "h100", 1, global_batch=8),
    "a pipeline": space("gpt3-2.7b", "a100-80gb", 16, frozenset({"mesh"}), mesh="pipe=8,data=2", global_batch=32),
    "hardly any room": space("gpt3-6.7b", "a100-40gb", 8, frozenset({"mesh"}), mesh="pipe=8", global_batch=32),
    "some pinned": space("gpt3-2.7b", "a100-40gb", 8, frozenset({"recompute", "micro_batch"}), global_batch=16),
}


@pytest.mark.parametrize("name", CASES)
def test_it_finds_what_looking_at_every_plan_finds(name):
    of, top = CASES[name], 6
    found, all_plans = rank(of, find(of.hardware), top), every(of)
    fitting = [each for each in all_plans if each.fits]
    best: dict[object, float] = {}
    for each in fitting:
        cut = dataclasses.replace(each.plan, recompute="none")
        key = mesh.format_mesh(each.plan.sizes) if "mesh" in of.free else cut
        best[key] = min(best.get(key, each.step_seconds), each.step_seconds)
    assert fitting
    assert [each.step_seconds for each in found.plans] == pytest.approx(sorted(best.values())[:top], rel=1e-8)
    assert (found.legal, found.meshes) == (len(all_plans), len(list(of.meshes())))
    fastest = min(all_plans, key=lambda each: each.step_seconds)
    if found.too_large is not None:
        assert found.too_large.step_seconds == pytest.approx(fastest.step_seconds, rel=1e-8)
        assert not found.too_large.fits
    else:
        assert fastest.step_seconds == pytest.approx(found.plans[0].step_seconds, rel=1e-8)


def test_it_says_the_same_each_time():
    of = CASES["little room"]

    def told(found: Ranking) -> list[Plan]:
        return [each.plan for each in found.plans]

    assert told(rank(of, find(of.hardware))) == told(rank(of, find(of.hardware)))


def test_a_large_search_predicts_a_small_part():
    of = space("gpt3-6.7b", "a100-80gb", 32, global_batch=32)
    found = rank(of, find("a100-80gb"))
    assert found.fits
    assert found.predicted < found.legal / 5


# None


def refused(name: str, hardware: str, devices: int, kept: tuple[str, ...] = (), **fields: object) -> str:
    with pytest.raises(UserError) as caught:
        search(dataclasses.replace(preset(name), **fields), find(hardware), devices, kept)
    return str(caught.value)


def changed(message: str) -> list[str]:
    """The flags that the message proposes, each with its value."""
    return message.rpartition("smallest change: ")[2].split(" or ")


def test_devices_that_divide_nothing():
    message = refused("gpt2-124m", "h100", 7)
    assert message.startswith("--devices 7: no plan is legal; the nearest to it: --")
    flags = dict(each.split() for each in changed(message))
    assert flags.keys() == {"--global-batch", "--devices"}
    config, hardware = preset("gpt2-124m"), find("h100")
    assert search(config, hardware, int(flags["--devices"])).plans
    assert search(dataclasses.replace(config, global_batch=int(flags["--global-batch"])), hardware, 7).plans


def test_a_batch_that_no_plan_can_divide():
    one_token = dataclasses.replace(preset("gpt2-124m").model, heads=1, layers=1, seq=2, vocab=51)
    message = refused("gpt2-124m", "h100", 8, model=one_token, global_batch=3)
    assert "--global-batch 3: must be a multiple of data x fsdp" in message
    assert changed(message) == ["--global-batch 8", "--devices 3"]


def test_a_pin_that_leaves_nothing():
    message = refused("gpt2-124m", "h100", 2, ("micro_batch", "schedule", "virtual_stages"), micro_batch=7)
    assert "--micro-batch 7" in message
    assert "without --micro-batch 7" in changed(message)


def test_a_pinned_mesh_is_refused_as_train_refuses_it():
    message = refused("gpt2-124m", "h100", 5, ("mesh",), mesh="tensor=5")
    assert message.startswith("--mesh tensor=5: tensor=5 must divide --heads 12")


def test_a_model_too_large_names_the_least_memory_and_changes_that_make_it_fit():
    message = refused("gpt3-13b", "a100-80gb", 1, global_batch=8)
    assert message.startswith("--hardware a100-80gb: no plan fits 1: memory, ")
    flags = dict(each.split() for each in changed(message))
    config = dataclasses.replace(preset("gpt3-13b"), global_batch=8)
    assert search(config, find("a100-80gb"), int(flags["--devices"])).fits
    for fewer in range(2, int(flags["--devices"])):
        with pytest.raises(UserError, match="no plan"):
            search(config, find("a100-80gb"), fewer)


def test_a_pinned_mesh_that_does_not_fit_is_told_all_the_same():
    config = dataclasses.replace(preset("gpt3-13b"), mesh="data=8")
    found = search(config, find("h100"), 8, ("mesh",))
    assert not found.fits
    least = smallest(found.space, find("h100"))
    assert [each.plan for each in found.plans] == [least.plan]
