"""Recomputation by the first few layers: what may be said, that no number changes, and that memory lies in between."""

import dataclasses

import numpy as np
import pytest
from quickly import unoptimized
from tiny import GPT, batches, run_config

from jaxgpt.config import RunConfig
from jaxgpt.errors import UserError
from jaxgpt.planner.plan import Plan
from jaxgpt.recomputation import KINDS, counted, recomputation
from jaxgpt.training import parity

DEEP = dataclasses.replace(GPT, dropout=0.1, layers=8)


@pytest.mark.parametrize(
    "said", ["half", "", "full:", "full:0", "full:-1", "full:1.5", "full:01", "full:\uff19", "none:1"]
)
def test_what_is_none_is_refused_in_one_line(said: str) -> None:
    with pytest.raises(UserError, match="must be none, selective or full; or selective:N or full:N") as error:
        RunConfig(recompute=said)
    assert str(error.value).startswith(f"--recompute {said}: ")
    assert "\n" not in str(error.value)


def test_more_layers_than_the_model_has_are_refused() -> None:
    assert run_config(DEEP, recompute="full:8").recompute == "full:8"
    with pytest.raises(UserError, match="--recompute full:9: must name at most the 8 layers of the model"):
        run_config(DEEP, recompute="full:9")


def test_counting_and_reading_are_each_others_inverse() -> None:
    for kind in KINDS[1:]:
        for layers in range(1, 6):
            said = recomputation(counted(kind, layers, 5))
            assert (said.kind, said.of(5)) == (kind, layers)
            assert said.of(2) == min(layers, 2)
    assert {counted(kind, 0, 5) for kind in KINDS} == {"none"}


def test_parts_are_pipelines_parts() -> None:
    """The first 3 of 5 + 5 + 6, and of 2 + 2 + 12 layers."""
    even, by_hand = Plan(pipe=3, recompute="full:3"), Plan(pipe=3, stages="2,2,12", recompute="full:3")
    assert (even.parts(16), by_hand.parts(16)) == ([5, 5, 6], [2, 2, 12])
    assert (even.repeated(16), by_hand.repeated(16)) == (9 / 16, 7 / 16)


def test_numbers_stay_and_memory_shrinks_with_the_count() -> None:
    batch, found = batches(run_config(DEEP), 1)[0], {}
    with unoptimized():
        for recompute in ("none", "full:2", "full:6", "full"):
            p = parity.program(run_config(DEEP, recompute=recompute), "data=1")
            params, placed, step = p.init()["params"], p.place(batch), np.int32(3)
            compiled = p.gradients.lower(params, placed, step).compile()
            found[recompute] = compiled(params, placed, step), compiled.memory_analysis().temp_size_in_bytes
    memory = [bytes_held for _, bytes_held in found.values()]
    assert memory == sorted(memory, reverse=True) and len(set(memory)) == 4
    (loss, gradients, _), _ = found.pop("none")
    for recompute, ((again, gradients_again, _), _) in found.items():
        np.testing.assert_allclose(loss, again, rtol=1e-6, err_msg=recompute)
        for name, gradient in gradients.items():
            scale = max(float(abs(gradient).max()) * 1e-5, 1e-8)
            assert float(abs(gradient - gradients_again[name]).max()) <= scale, (recompute, name)
