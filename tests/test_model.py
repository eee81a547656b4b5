"""The model against the same written a second time, plainly: loss, every gradient, logits; in every variant."""

import dataclasses

import jax
import numpy as np
import plain
import pytest
from tiny import GPT, LLAMA, batches, run_config

from jaxgpt.config import ModelConfig, RopeScaling
from jaxgpt.model.parameters import parameter_count, parameters
from jaxgpt.sharding.mesh import build, parse
from jaxgpt.training.program import Program

VARIANTS = {
    "gpt2": GPT,
    "llama": LLAMA,
    "neox": dataclasses.replace(
        GPT, positions="rotary", rope_fraction=0.5, parallel_residual=True, activation="gelu", tied=False, head_width=8
    ),
    "mistral": dataclasses.replace(LLAMA, window=5, kv_heads=2, head_width=6, tied=False),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, qkv_bias=True, rope_scaling=RopeScaling(factor=4.0)),
    "opt-like": dataclasses.replace(GPT, activation="relu", mlp_bias=False, norm_bias=False, vocab=17),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.core
def test_loss_gradients_and_logits_are_those_of_the_plain_model(name: str) -> None:
    model = VARIANTS[name]
    config = run_config(model, global_batch=8)
    program = Program(config, build(parse("data=1"), jax.devices()[:1]))
    params = start_apart(program)
    batch = batches(config, 1)[0]
    loss, gradients, _ = program.gradients(params, program.place(batch), np.int32(0))
    plainly = {n: np.asarray(p) for n, p in params.items()}
    wanted, wanted_gradients = jax.jit(jax.value_and_grad(lambda p: plain.loss(model, p, **renamed(batch))))(plainly)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    largest = max(float(abs(g).max()) for g in wanted_gradients.values())
    for parameter, gradient in gradients.items():
        scale = float(abs(wanted_gradients[parameter]).max())
        difference = float(abs(np.asarray(gradient) - wanted_gradients[parameter]).max())
        assert difference <= max(1e-5 * scale, 1e-7 * largest), parameter
    logits = program.logits(params, program.place_tokens(batch["inputs"]))[..., : model.vocab]
    expected = plain.logits(model, plainly, batch["inputs"])
    np.testing.assert_allclose(logits, expected, atol=1e-5 * float(abs(expected).max()))


def start_apart(program: Program) -> dict[str, jax.Array]:
    """Parameters far from their start, norms and biases too: at the start a bias of zero hides that it is not used."""
    rng = np.random.default_rng(0)
    return {
        n: jax.device_put(
            np.asarray(p) + rng.normal(0, 0.1, p.shape).astype(np.float32) * unpadded(program, n), p.sharding
        )
        for n, p in program.init()["params"].items()
    }


def unpadded(program: Program, name: str) -> np.ndarray:
    """1 where a parameter is real, 0 where it is padding."""
    shape, logical = parameters(program.config.model)[name].shape, program.logical[name]
    return np.pad(np.ones(logical, np.float32), [(0, whole - part) for whole, part in zip(shape, logical, strict=True)])


def renamed(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"tokens": batch["inputs"], "targets": batch["targets"]}


def test_parameter_count_of_gpt2() -> None:
    small = ModelConfig(layers=12, width=768, heads=12, vocab=50257, seq=1024)
    assert parameter_count(small) == 124_439_808  # GPT-2's own


def test_padding_stays_zero_and_is_never_likely() -> None:
    """Padded entries get neither gradient nor decay, and no probability."""
    model = dataclasses.replace(GPT, vocab=17, tied=False)
    config = run_config(model, weight_decay=0.5)
    program = Program(config, build(parse("tensor=2"), jax.devices()[:2]))
    state = program.init()
    for batch in batches(config, 2):
        state, _ = program.step(state, program.place(batch))
    for name in ("embedding.token.weight", "head.weight"):
        assert not np.asarray(state["params"][name])[17:].any()
        assert np.asarray(state["params"][name])[:17].any()
    logits = np.asarray(program.logits(state["params"], program.place_tokens(batch["inputs"])))
    assert logits[..., 17:].max() < -1e20
