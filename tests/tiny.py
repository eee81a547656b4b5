"""Tiny models, batches and runs that tests share."""

import dataclasses

import numpy as np

from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.data.loader import at_edges

GPT = ModelConfig(layers=2, width=32, heads=8, vocab=127, seq=16)
LLAMA = ModelConfig(
    layers=2,
    width=32,
    heads=8,
    kv_heads=4,
    mlp_width=64,
    vocab=127,
    seq=16,
    positions="rotary",
    norm="rmsnorm",
    norm_bias=False,
    activation="silu",
    gated=True,
    qkv_bias=False,
    attention_bias=False,
    mlp_bias=False,
)
FAMILIES = {"gpt": GPT, "llama": LLAMA}


def run_config(model: ModelConfig = GPT, **fields: object) -> RunConfig:
    """A run whose Adam epsilon does not turn rounding into steps."""
    base = RunConfig(model=model, global_batch=32, steps=10, warmup=2, lr=1e-2, epsilon=1e-3)
    return dataclasses.replace(base, **fields)


def batches(config: RunConfig, count: int, seed: int = 0, masked: float = 0.2) -> list[dict[str, np.ndarray]]:
    """Random tokens; a share of the targets is not counted, so that microbatches and devices differ in tokens."""
    rng = np.random.default_rng(seed)
    shape = (config.global_batch, config.model.seq + 1)
    found = []
    for _ in range(count):
        tokens = rng.integers(0, config.model.vocab, shape).astype(np.int32)
        targets = np.where(rng.random((shape[0], shape[1] - 1)) < masked, -1, tokens[:, 1:]).astype(np.int32)
        targets[: shape[0] // 8] = -1  # whole samples, too, so that some microbatches have no token at all
        found.append({"inputs": tokens[:, :-1].copy(), "targets": targets})
    return found


def packed(config: RunConfig, count: int, seed: int = 0, masked: float = 0.2) -> list[dict[str, np.ndarray]]:
    """Such batches of several documents a sample: one to about eight, some over many chunks of a split sequence."""
    rng, found = np.random.default_rng(seed + 1), batches(config, count, seed, masked)
    rows, seq = found[0]["inputs"].shape
    for each in found:
        begins = rng.random((rows, seq + 1)) < rng.choice([0.0, 0.1, 0.2, 0.5], (rows, 1))
        begins[:, 0] = False
        each |= at_edges(each["inputs"], each["targets"], begins, "separate")
    return found
