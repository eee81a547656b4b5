"""Models to and from transformers itself. Needs torch, so these run apart: pytest -m torch."""

import dataclasses
import importlib
import logging
from typing import Any

import numpy as np
import pytest
from foreign import FAMILIES, drawn, program

import jaxgpt
from jaxgpt.data.tokenizer import BytesTokenizer
from jaxgpt.inference.decoding import Decoding
from jaxgpt.inference.generate import Row, generate
from jaxgpt.inference.sampling import Sampling
from jaxgpt.interop.export import export

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

SEQ = 96
TOKENS = np.random.default_rng(0).integers(0, 127, (2, 21))

THEIRS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 3, "n_embd": 40, "n_head": 5, "n_positions": SEQ, "vocab_size": 131},
    "gpt_neox": {
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 3,
        "intermediate_size": 52,
        "max_position_embeddings": SEQ,
        "vocab_size": 131,
    },
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 52,
        "max_position_embeddings": SEQ,
        "vocab_size": 131,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    },
}
THEIRS["mistral"] = THEIRS["llama"] | {"sliding_window": 7, "head_dim": 10, "rope_parameters": {"rope_theta": 1000.0}}
THEIRS["qwen2"] = THEIRS["llama"] | {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1000.0}}
THEIRS["qwen3"] = THEIRS["qwen2"] | {"head_dim": 14}


@pytest.fixture(scope="module")
def torch() -> Any:
    return importlib.import_module("torch")


@pytest.fixture(scope="module")
def transformers() -> Any:
    return importlib.import_module("transformers")


def logits_there(torch: Any, model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def greedy_there(torch: Any, model: Any, tokens: np.ndarray, count: int) -> list[int]:
    found = model.generate(torch.tensor(tokens), max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return found[0, tokens.shape[1] :].tolist()


def greedy_here(of: Any, params: Any, tokens: np.ndarray, count: int) -> list[int]:
    row = Row(tokens[0].tolist())
    for _ in generate(Decoding(of.decoder, params), [row], SEQ, count, Sampling(temperature=0)):
        pass
    return row.written


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape
    assert float(np.abs(found - wanted).max()) <= 1e-4 * max(1.0, float(np.abs(wanted).max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_our_model_loads_there_without_a_warning(family, tmp_path, torch, transformers, caplog, recwarn):
    model = dataclasses.replace(FAMILIES[family], seq=SEQ, dropout=0.0)
    of = program(model)
    params = drawn(of)
    export(tmp_path / "out", model, params, of.in_order, None, {})
    transformers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [str(warning.message) for warning in recwarn if "transformers" in warning.filename]
    run = jaxgpt.load(tmp_path / "out")
    close(np.asarray(run(TOKENS)), logits_there(torch, there, TOKENS))
    assert greedy_here(of, params, TOKENS[:1], 64) == greedy_there(torch, there, TOKENS[:1], 64)


@pytest.mark.parametrize("family", THEIRS)
def test_their_model_loads_here(family, tmp_path, torch, transformers):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, initializer_range=0.3, **THEIRS[family])
    there = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # biases and norms begin as constants, which would hide one taken for another
        for parameter in there.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    there.save_pretrained(tmp_path / "there")
    run = jaxgpt.load(tmp_path / "there", mesh="fsdp=2,tensor=1")
    close(np.asarray(run(TOKENS)), logits_there(torch, there, TOKENS))
    assert greedy_here(run.program, run.params, TOKENS[:1], 64) == greedy_there(torch, there, TOKENS[:1], 64)


def test_our_tokenizer_loads_there(tmp_path, transformers):
    model = dataclasses.replace(FAMILIES["llama"], vocab=256)
    of = program(model)
    export(tmp_path / "out", model, drawn(of), of.in_order, BytesTokenizer(), {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def f(x):\n    return 'ä€'\n"
    assert tokenizer(text)["input_ids"] == BytesTokenizer().encode(text).tolist()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
