"""--mesh auto: the plan for the devices that are here, what is kept, what is tried, and where the word is refused."""

import dataclasses

import jax
import pytest
from bigram import config
from tiny import GPT, LLAMA, run_config

from jaxgpt.cli import main
from jaxgpt.errors import UserError
from jaxgpt.planner import choose, trial
from jaxgpt.planner.choose import auto, search
from jaxgpt.planner.hardware import find
from jaxgpt.planner.legal import FREE
from jaxgpt.sharding import mesh
from jaxgpt.training import folder, run
from jaxgpt.training.console import Console
from jaxgpt.training.program import Program

pytest_plugins = ["run_fixtures"]


@pytest.fixture(autouse=True)
def tabulated(monkeypatch):
    """By the table, and two trials alone: measuring takes seconds, and has tests of its own."""
    monkeypatch.setattr(choose, "calibrated", lambda hardware, devices, dtype: hardware)
    monkeypatch.setattr(trial, "MOST", 2)


@pytest.fixture
def clock(monkeypatch):
    """Seconds of a step by mesh, as if they were measured; of meshes that are not in it a second. And the meshes that
    were, in order."""
    seconds, asked = {}, []

    def measured(program):
        asked.append(program.config.mesh)
        return seconds.get(program.config.mesh, 1.0)

    monkeypatch.setattr(trial, "measured", measured)
    return seconds, asked


@pytest.fixture
def even(monkeypatch):
    """A ranking in which all plans are predicted to be equally fast, and its meshes."""
    base = run_config(LLAMA, mesh="auto", global_batch=16)
    found = search(base, find("h100"), len(jax.devices()), set(FREE) - {"mesh"}, top=4)
    level = [dataclasses.replace(each, time=found.plans[0].time) for each in found.plans]
    return base, level, [mesh.format_mesh(each.plan.sizes) for each in level]


def test_a_run_trains_on_what_is_chosen_and_is_resumed_on_it(data, tmp_path, capsys):
    where = tmp_path / "run"
    wanted = dataclasses.replace(config(data), mesh="auto", steps=5, global_batch=8)
    assert run.train(wanted, where, frozenset({"mesh", "zero"})).step == 5
    stored = folder.stored_config(where)
    sizes = mesh.parse(stored.mesh, len(jax.devices()))
    mesh.check(stored, sizes)
    assert f"--mesh auto: {mesh.format_mesh(sizes)}" in capsys.readouterr().out
    assert run.train(dataclasses.replace(stored, steps=6), where, frozenset({"steps"})).step == 6
    assert folder.stored_config(where).mesh == stored.mesh
    again = dataclasses.replace(stored, steps=7, mesh="auto")
    assert run.train(again, where, frozenset({"steps", "mesh"})).step == 7
    assert folder.stored_config(where).mesh == stored.mesh
    assert f"--mesh auto: the run's own stays, {stored.mesh}" in capsys.readouterr().out


def test_a_run_of_fewer_devices_is_moved_to_what_is_chosen_for_all(data, tmp_path, clock):
    where = tmp_path / "run"
    begun = dataclasses.replace(config(data), mesh="data=4", steps=5, global_batch=8)
    run.train(begun, where)
    assert run.train(dataclasses.replace(begun, mesh="auto", steps=6), where, frozenset({"mesh", "steps"})).step == 6
    assert mesh.devices_named(folder.stored_config(where).mesh) == len(jax.devices())
    assert clock[1]


def test_what_is_kept_stays_and_all_else_is_free(clock):
    base = run_config(LLAMA, mesh="auto", micro_batch=1, recompute="full", global_batch=16)
    kept = auto(base, jax.devices(), None, Console())
    assert (kept.micro_batch, kept.recompute, kept.zero) == (1, "full", 0)
    assert mesh.devices_named(kept.mesh) == len(jax.devices())
    free = auto(base, jax.devices(), {"mesh", "zero"}, Console())
    assert (free.zero, free.recompute) == (0, "none")


def test_the_plan_that_a_trial_finds_fastest_is_taken(monkeypatch, clock, capsys):
    seconds, asked = clock
    monkeypatch.setattr(trial, "NEAR", 100.0)
    monkeypatch.setattr(trial, "MOST", 3)
    base = run_config(LLAMA, mesh="auto", global_batch=16)
    predicted = auto(base, jax.devices(), None, Console()).mesh
    assert asked[0] == predicted
    assert len(set(asked)) == 3
    seconds[asked[2]] = 0.5
    assert auto(base, jax.devices(), None, Console()).mesh == asked[2] == asked[5]
    said = capsys.readouterr().out
    assert f"--mesh auto: tries {asked[1]}" in said
    assert "500 ms" in said


def test_plans_that_are_predicted_to_be_slow_are_not_tried(clock, even):
    base, plans, meshes = even
    slow = dataclasses.replace(plans[0].time, computation=2 * plans[0].time.step)
    ranked = [plans[0], plans[1], dataclasses.replace(plans[2], time=slow)]
    assert len(trial.run(ranked, base, jax.devices(), Console())) == 2
    assert trial.run([ranked[0], ranked[2]], base, jax.devices(), Console()) == []
    assert clock[1] == meshes[:2]


def test_what_does_not_fit_as_compiled_gives_way_to_the_next(clock, even, capsys):
    base, plans, meshes = even
    large = dataclasses.replace(plans[0], capacity=1000)
    trials = trial.run([large, *plans[1:]], base, jax.devices(), Console())
    assert [mesh.format_mesh(each.estimate.plan.sizes) for each in trials] == meshes[1:3] == clock[1]
    assert f"{meshes[0]} is passed over: compiled, it needs" in capsys.readouterr().out
    with pytest.raises(UserError, match="none of the 2 plans predicted to be fastest fits as compiled"):
        trial.run([large, large], base, jax.devices(), Console())


def test_a_trial_takes_the_shortest_of_real_steps(monkeypatch):
    program = Program(
        run_config(LLAMA, mesh="data=4,tensor=2", global_batch=8),
        mesh.build(mesh.parse("data=4,tensor=2"), jax.devices()),
    )
    states = []
    real = Program.step

    def step(self, state, batch):
        found = real(self, state, batch)
        states.append(found)
        return found

    monkeypatch.setattr(Program, "step", step)
    times = iter([0.0, 3.0, 10.0, 12.0, 20.0, 29.0, 30.0, 31.5, 40.0, 47.0])
    monkeypatch.setattr(trial.time, "perf_counter", lambda: next(times))
    assert trial.measured(program) == 1.5
    assert len(states) == trial.STEPS + 1
    assert int(states[-1][0]["step"]) == len(states)


@pytest.mark.parametrize("verb", ["check", "explain"])
def test_other_verbs_say_who_chooses(verb, capsys):
    assert main([verb, "--mesh", "auto"]) == 2
    assert "--mesh auto: only train and plan choose a mesh; jaxgpt plan names" in capsys.readouterr().err


def test_no_legal_mesh_for_what_is_here_is_refused(data, tmp_path):
    odd = dataclasses.replace(config(data), mesh="auto", global_batch=1)
    odd = dataclasses.replace(odd, model=dataclasses.replace(odd.model, heads=1, width=15, seq=7))
    with pytest.raises(UserError, match="--devices 8: no plan is legal"):
        run.train(odd, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_planned_meshes_are_traced_as_they_are_planned():
    """A sample of all that the search can propose on eight devices, each the train step of a run."""
    base = run_config(dataclasses.replace(GPT, layers=4), global_batch=16)
    found = search(base, find("h100"), 8, top=1000).plans
    assert {axis for each in found for axis, size in each.plan.sizes.items() if size > 1} == set(mesh.AXES)
    devices = mesh.prepare_devices(8)[0]
    sample = found[:: max(1, len(found) // 6)]
    for each in sample:
        chosen = each.plan.apply(base)
        sizes = mesh.parse(chosen.mesh, 8)
        mesh.check(chosen, sizes)
        program = Program(dataclasses.replace(chosen, dtype="fp32"), mesh.build(sizes, devices))
        assert program.micro_batch == each.plan.micro_batch * each.plan.replicas
        assert program.schedule.microbatches == each.plan.microbatches(16)
        assert program.traced.jaxpr.eqns


def test_every_name_that_may_be_free_is_a_field_of_a_run():
    assert set(FREE) <= {field.name for field in dataclasses.fields(run_config())}
