"""A model's functions and optimizer replaced by some of one's own: one device's numbers on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from foreign import FAMILIES, exported
from quickly import unoptimized

import jaxgpt
from jaxgpt.errors import UserError

MESHES = ["data=2,fsdp=2", "tensor=4", "context=2,tensor=2", "pipe=2"]
TOKENS = np.random.default_rng(0).integers(0, 256, (4, 17)).astype(np.int32)


def attention(q, k, v):
    """Squared scores of the keys before and at each query, without a softmax."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1]
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.tril(jax.nn.relu(scores) ** 2), v)


def softmax(q, k, v):
    """The model's own."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def norm(x, scale, bias):
    return x / (1 + jnp.max(jnp.abs(x), -1, keepdims=True)) * scale


def squared(x):
    return jax.nn.relu(x) ** 2


def mlp(x, up, down):
    wide = up(x)
    return down(jnp.tanh(wide[..., 0, :]) * wide[..., 1, :])


@pytest.fixture(autouse=True)
def cheaply():
    with unoptimized():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("replaced"), dataclasses.replace(FAMILIES["qwen2"], vocab=256))


@pytest.fixture
def one(folder):
    return jaxgpt.load(folder / "model")


def same(found, wanted):
    loss, gradients = found
    expected_loss, expected = wanted
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for name, gradient in gradients.items():
        scale = float(np.abs(expected[name]).max())
        assert scale > 0 or "norm" in name, name  # one's own norm has no bias
        assert np.abs(np.asarray(gradient)[: len(expected[name])] - np.asarray(expected[name])).max() <= 1e-5 * scale


def test_the_models_own_attention_as_ones_own_is_the_model(one):
    same(one.replace(attention=softmax).value_and_grad(TOKENS), one.value_and_grad(TOKENS))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("own", [{"attention": attention, "norm": norm, "activation": squared}, {"mlp": mlp}])
def test_gradients_and_logits_are_one_devices(folder, one, mesh, own):
    alone, many = one.replace(**own), jaxgpt.load(folder / "model", mesh).replace(**own)
    wanted = alone.value_and_grad(TOKENS)
    assert abs(float(wanted[0]) - float(one.value_and_grad(TOKENS)[0])) > 1e-4  # they do something
    same(many.value_and_grad(TOKENS), wanted)
    np.testing.assert_allclose(many(TOKENS[:, :13]), alone(TOKENS[:, :13]), atol=1e-5)


@pytest.mark.parametrize("fields", [{"sequence_parallel": True}, {"recompute": "selective"}, {"zero": 3}])
def test_ways_of_training_do_not_stand_in_the_way(fields):
    own = {"attention": attention, "norm": norm, "activation": squared}
    model = dataclasses.replace(FAMILIES["gpt2"], vocab=256)
    config = jaxgpt.RunConfig(model=model, tokenizer="bytes", mesh="data=1", global_batch=4)
    wanted = jaxgpt.start(config).replace(**own).value_and_grad(TOKENS)
    many = dataclasses.replace(config, mesh="data=2,tensor=2", **fields)
    same(jaxgpt.start(many).replace(**own).value_and_grad(TOKENS), wanted)


def test_texts_are_one_devices_with_an_attention_of_ones_own(folder, one):
    prompts = ["ab", "the same wo"]
    wanted = one.replace(attention=attention).generate(prompts, 8, temperature=0)
    many = jaxgpt.load(folder / "model", "context=2,tensor=2").replace(attention=attention)
    assert many.generate(prompts, 8, temperature=0) == wanted
    # without a cache it writes what it writes with one
    assert one.replace(attention=softmax).generate(prompts, 8) == one.generate(prompts, 8)


@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "pipe=2"])
def test_an_optimizer_sees_whole_arrays_on_every_mesh(folder, one, mesh):
    rule = optax.chain(optax.clip_by_global_norm(0.1), optax.scale_by_trust_ratio(), optax.sgd(0.02, momentum=0.9))
    how = {"steps": 4, "quiet": True, "optimizer": rule, "global_batch": 4}
    many = jaxgpt.load(folder / "model", mesh)
    wanted = one.fit(str(folder / "text.txt"), **how).losses
    np.testing.assert_allclose(many.fit(str(folder / "text.txt"), **how).losses, wanted, rtol=1e-5)
    assert wanted[-1] < wanted[0]
    for name, array in many.params.items():
        assert array.sharding == many.program.shardings[name]


def test_fit_trains_what_is_replaced(one, folder):
    own = one.replace(activation=squared)
    own.fit(str(folder / "text.txt"), steps=4, quiet=True, lr=3e-3, global_batch=4)
    assert own.losses[-1] < own.losses[0]
    assert not one.losses


def test_what_cannot_be_replaced(one):
    with pytest.raises(UserError, match="cannot be replaced; known are attention, activation, mlp, norm"):
        one.replace(head=squared)
    with pytest.raises(UserError, match="must be a function"):
        one.replace(norm="rmsnorm")
    with pytest.raises(UserError, match=r"attention_of_another_shape .* must return the shape"):
        one.replace(attention=attention_of_another_shape)(TOKENS[:, :16])


def attention_of_another_shape(q, k, v):
    return q[:, :-1]
