"""The compiled programs: a start that is split, recomputation that only saves memory, evaluation, logits, bf16."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny import GPT, LLAMA, batches, run_config

from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.model.parameters import parameters
from jaxgpt.sharding.mesh import build, parse
from jaxgpt.training.program import Program

pytestmark = pytest.mark.core


def program(config: RunConfig, mesh: str = "data=1") -> Program:
    sizes = parse(mesh)
    return Program(config, build(sizes, jax.devices()[: int(np.prod(list(sizes.values())))]))


def test_the_start_is_the_same_on_every_mesh() -> None:
    one, other = (program(run_config(LLAMA), mesh).init()["params"] for mesh in ("data=1", "data=2,fsdp=2,tensor=2"))
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_a_layer_starts_the_same_however_many_there_are() -> None:
    few, many = (program(run_config(dataclasses.replace(GPT, layers=n))).init()["params"] for n in (2, 3))
    name = "blocks.mlp.up.weight"
    np.testing.assert_array_equal(few[name], many[name][:2])
    assert not np.array_equal(few[name][0], few[name][1])


def test_no_device_holds_a_whole_copy_of_a_split_array_while_it_is_created() -> None:
    wide = ModelConfig(layers=2, width=256, heads=8, vocab=1024, seq=16)
    split = program(run_config(wide), "fsdp=4,tensor=2")
    whole = sum(4 * int(np.prod(p.shape)) for p in parameters(wide).values())
    analysis = split.compiled_init.memory_analysis()
    assert analysis.output_size_in_bytes < 1.1 * 3 * whole / 8
    assert analysis.temp_size_in_bytes < whole / 4  # random bits of a device's own share, twice


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recomputation_changes_nothing_but_memory(policy: str) -> None:
    model = dataclasses.replace(GPT, dropout=0.1, layers=8)
    batch = batches(run_config(model), 1)[0]
    found = {}
    for recompute in ("none", policy):
        p = program(run_config(model, recompute=recompute))
        params = p.init()["params"]
        placed, step = p.place(batch), np.int32(3)
        compiled = p.gradients.lower(params, placed, step).compile()
        found[recompute] = compiled(params, placed, step), compiled.memory_analysis().temp_size_in_bytes
    (loss, gradients, _), memory = found["none"]
    (again, gradients_again, _), memory_again = found[policy]
    np.testing.assert_allclose(loss, again, rtol=1e-6)
    for name, gradient in gradients.items():
        scale = max(float(abs(gradient).max()) * 1e-5, 1e-8)
        assert float(abs(gradient - gradients_again[name]).max()) <= scale, name
    assert memory_again < 0.8 * memory


def test_accumulation_is_one_batch() -> None:
    config = run_config(GPT)
    batch = batches(config, 1)[0]
    results = []
    for micro in (None, 4):
        p = program(dataclasses.replace(config, micro_batch=micro))
        results.append(p.gradients(p.init()["params"], p.place(batch), np.int32(0)))
    (loss, gradients, tokens), (loss_again, gradients_again, tokens_again) = results
    assert int(tokens) == int(tokens_again) == int((batch["targets"] >= 0).sum())
    np.testing.assert_allclose(loss, loss_again, rtol=1e-6)
    largest = max(float(abs(g).max()) for g in gradients.values())
    for name, gradient in gradients.items():
        allowed = max(1e-5 * float(abs(gradient).max()), 1e-7 * largest)  # as parity has it
        assert float(abs(gradient - gradients_again[name]).max()) <= allowed, name


def test_no_valid_token_gives_no_loss_and_no_nan() -> None:
    p = program(run_config(GPT))
    batch = batches(p.config, 1)[0]
    batch["targets"][:] = -1
    loss, gradients, tokens = p.gradients(p.init()["params"], p.place(batch), np.int32(0))
    assert float(loss) == 0 and int(tokens) == 0
    assert not any(np.asarray(g).any() for g in gradients.values())


def test_evaluation_has_no_dropout_and_is_the_same_on_every_mesh() -> None:
    config = run_config(dataclasses.replace(LLAMA, dropout=0.5))
    batch = batches(config, 1)[0]
    sums = []
    for each in (config, dataclasses.replace(config, model=LLAMA)):
        p = program(each)
        sums.append(p.evaluate(p.init()["params"], p.place(batch)))
    p = program(config, "data=2,fsdp=2,tensor=2")
    sums.append(p.evaluate(p.init()["params"], p.place(batch)))
    assert {int(tokens) for _, tokens in sums} == {int((batch["targets"] >= 0).sum())}
    np.testing.assert_allclose([float(loss) for loss, _ in sums], float(sums[0][0]), rtol=1e-6)


def test_causality_through_gradients() -> None:
    """No logit depends on a later token: change one, and all before it stay as they are."""
    p = program(run_config(LLAMA))
    params = p.init()["params"]
    tokens = batches(p.config, 1)[0]["inputs"][:2]
    changed = tokens.copy()
    changed[:, 9] = (changed[:, 9] + 1) % LLAMA.vocab
    one, other = (np.asarray(p.logits(params, p.place_tokens(t))) for t in (tokens, changed))
    np.testing.assert_array_equal(one[:, :9], other[:, :9])
    assert (one[:, 9:] != other[:, 9:]).any(-1).all()


def test_bf16_follows_fp32() -> None:
    """Masters, gradients and moments stay fp32; the loss differs by no more than bf16's rounding."""
    losses = {}
    for dtype in ("fp32", "bf16"):
        p = program(run_config(GPT, dtype=dtype), "fsdp=2,tensor=2")
        state = p.init()
        for batch in batches(p.config, 5):
            state, metrics = p.step(state, p.place(batch))
        assert {a.dtype for a in jax.tree.leaves((state["params"], state["mu"], state["nu"]))} == {np.dtype("float32")}
        losses[dtype] = float(metrics["loss"])
    assert losses["bf16"] != losses["fp32"]
    assert abs(losses["bf16"] - losses["fp32"]) < 2e-2


@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "pipe=2,tensor=2", "data=2,context=2,tensor=2"])
def test_what_is_split_over_a_typed_axis_enters_and_leaves_the_step_split(mesh: str) -> None:
    text = program(run_config(GPT, context_attention="ring"), mesh).compiled.as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text
