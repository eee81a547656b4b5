"""A step that is not finite: undone on every device, held until it has been seen, and its first bad tensor named."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from quickly import unoptimized
from tiny import GPT, batches, run_config
from wrong import SAMPLE, UNUSED, changed, with_unused

from jaxgpt.sharding.mesh import build, parse
from jaxgpt.training import optimizer
from jaxgpt.training.blame import Culprit, _guilty, find
from jaxgpt.training.program import Program

pytestmark = pytest.mark.core

Params = dict[str, Any]


def program(mesh: str, micro_batch: int) -> Program:
    sizes = parse(mesh)
    config = run_config(GPT, micro_batch=micro_batch)
    return Program(config, build(sizes, jax.devices()[: int(np.prod(list(sizes.values())))]))


@pytest.fixture(scope="module", params=[("data=2,fsdp=2", 1), ("pipe=2,tensor=2", 4)], ids=str)
def tried(request: pytest.FixtureRequest) -> Iterator[Program]:
    """Eight microbatches of four samples each."""
    with unoptimized():
        yield program(*request.param)


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    return batches(run_config(GPT), 1)[0]


@pytest.fixture(scope="module")
def bad(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return with_unused(batch)


def poisoned(program: Program, state: dict[str, Any]) -> dict[str, Any]:
    """A state that is finite, and whose steps are, but for samples with the unused token: its norm is not finite."""
    return state | {"params": changed(program, state["params"], "embedding.token.weight", 3e38, UNUSED)}


def content(state: Any) -> list[bytes]:
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(state)]


def test_a_bad_step_is_undone_and_held_and_training_goes_on_as_if_it_had_not_been(
    tried: Program, batch: dict[str, np.ndarray], bad: dict[str, np.ndarray]
) -> None:
    state = poisoned(tried, tried.init())
    state, metrics = tried.step(state, tried.place(batch))
    before = content(state)
    assert int(metrics["undone"]) == 0
    assert int(state["step"]) == 1
    state, metrics = tried.step(state, tried.place(bad) | {"undone": metrics["undone"]})
    assert (int(metrics["undone"]), content(state) == before) == (1, True)
    assert not np.isfinite(float(metrics["grad_norm"]))
    state, metrics = tried.step(state, tried.place(batch) | {"undone": metrics["undone"]})
    assert np.isfinite(float(metrics["grad_norm"]))
    assert (int(metrics["undone"]), content(state) == before) == (2, True)
    state, metrics = tried.step(state, tried.place(batch))  # once it has been seen
    straight = poisoned(tried, tried.init())
    for _ in range(2):
        straight, expected = tried.step(straight, tried.place(batch))
    assert content(state) == content(straight) != before
    assert content(metrics) == content(expected)


def test_the_state_takes_no_more_memory_than_its_own(tried: Program) -> None:
    found = tried.compiled.memory_analysis()
    local = sum(4 * int(np.prod(t.sharding.shard_shape(t.shape))) for t in jax.tree.leaves(tried.targets()))
    assert found.alias_size_in_bytes >= local


def test_without_the_choice_between_states_a_bad_step_would_spoil_the_parameters(
    batch: dict[str, np.ndarray], bad: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "_chosen", lambda good, new, old: new)
    with unoptimized():
        spoilt = program("data=1", 4)
        state, metrics = spoilt.step(poisoned(spoilt, spoilt.init()), spoilt.place(bad))
    assert int(metrics["undone"]) == 1
    assert not all(np.isfinite(np.asarray(p)).all() for p in state["params"].values())


def named(program: Program, params: Params, batch: dict[str, np.ndarray]) -> Culprit:
    return find(program, params, batch, 3)


def test_what_is_finite_is_not_blamed(tried: Program, batch: dict[str, np.ndarray]) -> None:
    found = named(tried, tried.init()["params"], batch)
    assert (found.what, found.samples, found.whole) == ("nothing", (), True)
    assert "may have miscomputed" in found.said()


def test_a_parameter_that_is_not_finite(tried: Program, bad: dict[str, np.ndarray]) -> None:
    params = tried.init()["params"]
    found = named(tried, changed(tried, params, "embedding.token.weight", np.inf, UNUSED), bad)
    assert found == Culprit("parameter", "embedding.token.weight", None, SAMPLE // 4, (SAMPLE,))
    assert not found.whole
    found = named(tried, changed(tried, params, "blocks.attention.value.weight", np.nan, 1), bad)
    assert found == Culprit("parameter", "blocks.attention.value.weight", 1, 0, (0, 1, 2, 3))
    assert "parameter blocks.attention.value.weight of layer 1, microbatch 0, samples 0, 1, 2, 3" in found.said()


def test_an_activation_that_one_sample_drives_beyond_all_bounds(tried: Program, bad: dict[str, np.ndarray]) -> None:
    found = named(tried, poisoned(tried, tried.init())["params"], bad)
    assert found == Culprit("activation", "blocks.attention", 0, SAMPLE // 4, (SAMPLE,))
    assert found.whole


@pytest.mark.parametrize("layer", [0, 1])
def test_an_activation_of_a_layer(layer: int, tried: Program, batch: dict[str, np.ndarray]) -> None:
    params = changed(tried, tried.init()["params"], "blocks.mlp.up.weight", 3e38, layer)
    assert named(tried, params, batch) == Culprit("activation", "blocks.mlp", layer, 0, (0, 1, 2, 3))


def test_a_loss(tried: Program, batch: dict[str, np.ndarray]) -> None:
    """The first eighth of the samples has no target, and so no loss."""
    params = changed(tried, tried.init()["params"], "final_norm.scale", 3e38)
    found = named(tried, params, batch)
    assert found == Culprit("loss", "the loss", None, 1, (4, 5, 6, 7))
    assert "first in the loss, microbatch 1" in found.said()


def test_a_gradient(tried: Program, batch: dict[str, np.ndarray]) -> None:
    """The feed-forward layer adds nothing, though its inside is large; the activation's derivative overflows there."""
    params = tried.init()["params"]
    params = changed(tried, changed(tried, params, "blocks.mlp.up.weight", 1e30, 1), "blocks.mlp.down.weight", 0, 1)
    found = named(tried, params, batch)
    assert found == Culprit("gradient", "blocks.mlp.up.bias", 1, 0, (0, 1, 2, 3))


def test_a_norm(tried: Program, batch: dict[str, np.ndarray]) -> None:
    """The feed-forward layer adds nothing, since its inside is 0; what flows back through it is large."""
    params = tried.init()["params"]
    params = params | {"embedding.token.weight": params["embedding.token.weight"] * 1e6}
    params = changed(tried, changed(tried, params, "blocks.mlp.up.weight", 0, 1), "blocks.mlp.down.weight", 3e38, 1)
    found = named(tried, params, batch)
    assert (found.what, found.microbatch, found.samples) == ("norm", None, ())


def test_samples_are_found_by_halves_and_not_all_of_many() -> None:
    asked: list[list[int]] = []

    def wrong(samples: Any) -> bool:
        asked.append(list(samples))
        return bool({5, 6, 700} & set(samples))

    assert _guilty(wrong, list(range(1024))) == [5, 6, 700]
    assert len(asked) < 60
    assert _guilty(lambda samples: True, list(range(64)), 3) == [0, 1, 2]
    assert _guilty(lambda samples: len(samples) > 1, list(range(8))) == []


def test_a_layer_of_a_pipeline_with_uneven_stages_is_the_models_own() -> None:
    with unoptimized():
        model = dataclasses.replace(GPT, layers=3)
        config = run_config(model, micro_batch=8, stages="2,1")
        uneven = Program(config, build(parse("pipe=2"), jax.devices()[:2]))
        params = changed(uneven, uneven.init()["params"], "blocks.mlp.up.weight", 3e38, 2)
        found = named(uneven, params, batches(config, 1)[0])
    assert (found.name, found.layer) == ("blocks.mlp", 2)


def test_documents_that_are_separate_are_looked_at_so(batch: dict[str, np.ndarray]) -> None:
    """No document is so long that it would come to the position whose embedding is too large."""
    with unoptimized():
        config = run_config(GPT, micro_batch=8, documents="separate")
        apart = Program(config, build(parse("data=1"), jax.devices()[:1]))
        params = changed(apart, apart.init()["params"], "embedding.position.weight", 3e38, 12)
        starts = np.broadcast_to(np.int32([0] * 8 + [8] * 8), batch["inputs"].shape)
        assert named(apart, params, batch | {"starts": starts}).what == "nothing"
        assert named(apart, params, batch | {"starts": 0 * starts}).what == "activation"
