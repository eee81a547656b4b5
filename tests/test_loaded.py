"""A model in a notebook: gradients, activations, training on and drawings, on a mesh as on one device."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from foreign import FAMILIES, exported
from quickly import unoptimized

import jaxgpt
from jaxgpt.errors import UserError

MESH = "fsdp=2,tensor=2"
TOKENS = np.random.default_rng(0).integers(0, 256, (3, 13)).astype(np.int32)


@pytest.fixture(autouse=True)
def cheaply():
    with unoptimized():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("loaded"), dataclasses.replace(FAMILIES["llama"], vocab=256, layers=3))


@pytest.fixture
def one(folder):
    return jaxgpt.load(folder / "model")


@pytest.fixture
def many(folder):
    return jaxgpt.load(folder / "model", MESH)


def test_gradients_lie_as_their_parameters_and_are_one_devices(one, many):
    loss, gradients = many.value_and_grad(TOKENS)
    wanted, expected = one.value_and_grad(TOKENS)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for name, gradient in gradients.items():
        assert gradient.sharding == many.params[name].sharding
        scale = float(np.abs(expected[name]).max())
        assert np.abs(np.asarray(gradient) - np.asarray(expected[name])).max() <= 1e-5 * scale, name


def test_the_loss_is_that_of_the_logits_and_uncounted_targets_are_not_counted(one):
    targets = TOKENS[:, 1:].copy()
    targets[:, ::2] = -1
    logits = np.asarray(one(TOKENS[:, :-1]), np.float64)
    each = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, TOKENS[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(one.value_and_grad(TOKENS)[0], each.mean(), rtol=1e-5)
    loss, _ = one.value_and_grad({"inputs": TOKENS[:, :-1], "targets": targets})
    np.testing.assert_allclose(loss, each[targets >= 0].mean(), rtol=1e-5)


@pytest.mark.parametrize("mesh", [MESH, "pipe=2", "context=2"])
def test_activations_are_one_devices_and_stay_split(folder, one, mesh):
    names, many = ("blocks.0", "blocks.1.attention", "blocks.1.mlp", "blocks.1"), jaxgpt.load(folder / "model", mesh)
    with one.capture(*names) as wanted:
        one(TOKENS)
    with many.capture(*names) as found:
        many(TOKENS)
    for name in names:
        expected = np.asarray(wanted[name])
        rows, columns = expected.shape[:2]
        np.testing.assert_allclose(np.asarray(found[name])[:rows, :columns], expected, atol=1e-5)
    whole = wanted["blocks.0"] + wanted["blocks.1.attention"] + wanted["blocks.1.mlp"]
    np.testing.assert_allclose(wanted["blocks.1"], whole, atol=1e-5)
    split = not jaxgpt.load(folder / "model", mesh).program.sizes["pipe"] > 1
    assert found["blocks.1"].sharding.is_fully_replicated != split


def test_outside_of_a_capture_nothing_is_captured(one):
    with one.capture("blocks.2") as found:
        pass
    one(TOKENS)
    assert found == {"blocks.2": None}


@pytest.mark.parametrize("name", ["blocks.3", "blocks.x", "blocks.0.", "blocks.0.norm", "head", ""])
def test_what_cannot_be_captured(one, name):
    with pytest.raises(UserError, match="blocks"), one.capture(name):
        pass


def test_fit_goes_on_from_here(folder, many):
    before = {name: np.asarray(array) for name, array in many.params.items()}
    held, model = many.params, many.model
    assert many.fit(str(folder / "text.txt"), steps=6, quiet=True, lr=3e-3, global_batch=8) is many
    assert len(many.losses) == many.step == 6
    assert many.losses[-1] < many.losses[0]
    for name, array in before.items():
        np.testing.assert_array_equal(held[name], array)  # what others hold stays as it was
        assert many.params[name].sharding == held[name].sharding
    assert many.model is not model
    with pytest.raises(UserError, match="is no field of a run"):
        many.fit(str(folder / "text.txt"), steps=1, learning_rate=1)


def test_parameters_are_drawn_as_they_lie(many):
    drawing = many.sbp()
    (row,) = (row for row in drawing.rows if row.name == "blocks.mlp.up.weight")
    assert row.signature == "fsdp: S(embed), tensor: S(mlp)"
    assert sorted(row.parts.ravel()) == [0, 1, 2, 3]
    (scale,) = (row for row in drawing.rows if row.name == "final_norm.scale")
    assert (scale.signature, set(scale.parts.ravel())) == ("B", {0})
    assert "fsdp 2 x tensor 2" in repr(drawing)
    assert drawing._repr_html_().count("<tr>") == len(many.params) + 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda run: run.value_and_grad(TOKENS[0]), "tokens (12,): must have two dimensions"),
        (lambda run: run.value_and_grad({"inputs": TOKENS}), "must have both inputs and targets"),
        (lambda run: run.fit("any", tokenizer="chars"), "tokenizer chars: is no field of a run"),
        (lambda run: run.replace(norm=lambda x, scale, bias: x[:1])(TOKENS), "must return the shape (3, 13, 32)"),
        (lambda run: run.replace(mlp=lambda x, up, down: up(x))(TOKENS), "must return the shape (3, 13, 32)"),
        (lambda run: run.generate("a", 0), "--tokens 0: must be at least 1"),
        (lambda run: run.generate("a", stop="b"), "stop b: must be a list of texts"),
        (lambda run: run.generate("a", temprature=1), "temprature 1: does not say how to write; known are temperature"),
    ],
)
def test_what_is_asked_wrongly(one, asked, says):
    with pytest.raises(UserError) as caught:
        asked(one)
    assert says in str(caught.value)


TYPES = {
    "run([[1, 2], [3]])": "tokens: rows must be of one length",
    "run.generate([1, 2])": "must be a text or a list of texts",
    "run.generate(None)": "must be a text or a list of texts",
    "run.generate('a', '5')": "--tokens 5: must be at least 1, and a whole number",
    "run.generate('a', stop=None)": "stop None: must be a list of texts",
    "run.generate('a', stop=[3])": "must be a list of texts",
    "run.generate('a', top_k=None)": "--top-k None: must be a whole number",
    "run.generate('a', temperature='1')": "--temperature 1: must be a number",
    "jaxgpt.load('any', {'data': 2})": "must be a text such as",
    "run.fit('any', steps=1, zero=9)": "zero 9: must be one of 0, 1, 2, 3",
    "run.fit('any', steps=1.5)": "steps 1.5: must be a whole number",
    "run.fit('any', optimizer=len)": "must be one of optax",
    "jaxgpt.start(jaxgpt.RunConfig(model=run.config.model, global_batch=8, dtype='fp8'))": "must be one of",
}
ASKED = """
import sys
import numpy as np, jaxgpt
run = jaxgpt.load(sys.argv[1])
how = {"temperature": np.float32(0.5), "top_k": np.int64(3), "seed": np.int64(1)}
assert run.generate("ab", np.int64(5), **how) == run.generate("ab", 5, temperature=0.5, top_k=3, seed=1)
for line in sys.argv[2:]:
    try:
        eval(line)
    except jaxgpt.UserError as error:
        print(error)
"""


def test_a_run_is_shown_in_a_line(many):
    assert repr(many).endswith("3 layers of width 32, vocabulary 256; step 0; fsdp=2,tensor=2")


def test_values_of_other_types(folder):
    """In a process of its own, since types are checked at every call in this one."""
    said = subprocess.run([sys.executable, "-c", ASKED, folder / "model", *TYPES], check=True, capture_output=True)
    for line, (asked, says) in zip(said.stdout.decode().splitlines(), TYPES.items(), strict=True):
        assert says in line, asked


def test_pieces_are_the_text(one):
    text = one.generate("ab", 12, temperature=0)
    assert "".join(one.stream("ab", 12, temperature=0)) == text
    assert one.generate(["ab", "c"], 12, temperature=0)[0] == text
    with pytest.raises(UserError, match="longer than the context of 16"):
        one.stream("x" * 17)
