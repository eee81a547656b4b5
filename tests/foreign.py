"""Tiny models of every family that others know, and programs on meshes."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from tiny import GPT, LLAMA, run_config

from jaxgpt.config import ModelConfig, RopeScaling
from jaxgpt.data.tokenizer import BytesTokenizer
from jaxgpt.interop.export import export
from jaxgpt.sharding.mesh import build, parse
from jaxgpt.training.program import Program

FAMILIES: dict[str, ModelConfig] = {
    "gpt2": dataclasses.replace(GPT, mlp_width=48),
    "gpt_neox": dataclasses.replace(
        GPT, positions="rotary", rope_fraction=0.5, parallel_residual=True, activation="gelu", tied=False
    ),
    "llama": dataclasses.replace(
        LLAMA,
        tied=False,
        rope_base=500.0,
        rope_scaling=RopeScaling(kind="llama3", factor=4.0, original_seq=8),
    ),
    "mistral": dataclasses.replace(LLAMA, window=5, head_width=6, tied=False),
    "qwen2": dataclasses.replace(LLAMA, qkv_bias=True),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, head_width=10),
}


def program(model: ModelConfig, mesh: str = "data=1", **fields: object) -> Program:
    sizes = parse(mesh)
    return Program(run_config(model, **fields), build(sizes, jax.devices()[: int(np.prod(list(sizes.values())))]))


def drawn(of: Program, seed: int = 0) -> dict[str, jax.Array]:
    """Parameters none of which is a constant, so that none can be left out or mistaken for another."""
    found = {}
    for number, (name, p) in enumerate(of.table.items()):
        rng = np.random.default_rng((seed, number))
        whole = rng.normal(0.02 if p.decays else 0.5, 0.1, p.logical).astype(np.float32)
        padded = np.zeros((*(p.logical[:1] if p.rows else p.shape[:1]), *p.shape[1:]), np.float32)
        padded[: len(whole)] = whole
        if p.rows:
            padded = np.stack([padded[layer] if layer >= 0 else np.zeros_like(padded[0]) for layer in p.rows])
        found[name] = jax.device_put(padded, of.shardings[name])
    return found


def exported(folder: Path, model: ModelConfig) -> Path:
    """The folder, with the model drawn and exported to "model", whose tokens are bytes, and a text to train on."""
    of = program(model)
    export(folder / "model", model, drawn(of), of.in_order, BytesTokenizer(), {})
    (folder / "text.txt").write_text("the same words again and again, " * 60)
    return folder


def in_order(of: Program, params: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Parameters as one device has them, without padding."""
    return {n: of.in_order(n, np.asarray(a))[: of.logical[n][0]] for n, a in params.items()}
