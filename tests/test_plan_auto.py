"""--mesh auto: the plan for the devices that are here, what is kept, and where the word is refused."""

import dataclasses

import jax
import pytest
from bigram import config
from tiny import GPT, LLAMA, run_config

from jaxgpt.cli import main
from jaxgpt.errors import UserError
from jaxgpt.planner import choose
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
    """By the table: measuring takes seconds, and has tests of its own."""
    monkeypatch.setattr(choose, "calibrated", lambda hardware, devices, dtype: hardware)


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


def test_what_is_kept_stays_and_all_else_is_free():
    base = run_config(LLAMA, mesh="auto", micro_batch=1, recompute="full", global_batch=16)
    kept = auto(base, jax.devices(), None, Console())
    assert (kept.micro_batch, kept.recompute, kept.zero) == (1, "full", 0)
    assert mesh.devices_named(kept.mesh) == len(jax.devices())
    free = auto(base, jax.devices(), {"mesh", "zero"}, Console())
    assert (free.zero, free.recompute) == (0, "none")


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
