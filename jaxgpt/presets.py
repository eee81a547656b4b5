"""Named models and the runs that train them, as published where a source is given; flags change any part of them.

Where a source leaves a number of a run open (GPT-2's learning rate, Megatron's), GPT-3's value for that size is taken.
"""

import dataclasses
import difflib
from pathlib import Path

from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.config_file import from_json
from jaxgpt.errors import UserError

DEMO = RunConfig(
    model=ModelConfig(
        layers=4,
        width=192,
        heads=6,
        kv_heads=2,
        vocab=1024,
        seq=128,
        positions="rotary",
        norm="rmsnorm",
        norm_bias=False,
        activation="silu",
        gated=True,
        qkv_bias=False,
        attention_bias=False,
        mlp_bias=False,
    ),
    steps=300,
    global_batch=16,
    lr=3e-3,
    min_lr=3e-4,
    warmup=30,
)


def _gpt(
    layers: int,
    width: int,
    heads: int,
    *,
    batch: int,
    lr: float,
    tokens: float,
    vocab: int = 50257,
    seq: int = 2048,
    head_width: int | None = None,
    micro: int = 4,
    tied: bool = True,
    recompute: str = "none",
) -> RunConfig:
    """A model of the GPT-2/3 family, trained on so many tokens as GPT-3 was (arXiv 2005.14165, appendix B):
    warm-up over 375 M tokens, cosine to a tenth, weight decay 0.1, beta2 0.95, clipping at 1.
    """
    a_step = batch * seq
    return RunConfig(
        model=ModelConfig(
            layers=layers, width=width, heads=heads, head_width=head_width, vocab=vocab, seq=seq, tied=tied
        ),
        global_batch=batch,
        micro_batch=micro,
        lr=lr,
        min_lr=lr / 10,
        warmup=round(375e6 / a_step),
        steps=round(tokens / a_step),
        recompute=recompute,
        eval_every=1000,
        save_every=1000,
    )


# Shapes: GPT-2's report, table 2. Batch 512 of 1024 tokens; the length, not published, is 10 B tokens here.
GPT2 = {
    "gpt2-124m": _gpt(12, 768, 12, seq=1024, batch=512, lr=6e-4, tokens=10e9),
    "gpt2-355m": _gpt(24, 1024, 16, seq=1024, batch=512, lr=3e-4, tokens=10e9),
    "gpt2-774m": _gpt(36, 1280, 20, seq=1024, batch=512, lr=2.5e-4, tokens=10e9),
    "gpt2-1.5b": _gpt(48, 1600, 25, seq=1024, batch=512, lr=2e-4, tokens=10e9),
}

# arXiv 2005.14165, table 2.1, 300 B tokens each; batches given there in tokens (3.2 M taken as 1536 sequences).
# 1.3B's and 13B's heads of 128 do not add up to the width (3072 for 2048, 5120 for 5140). All attention is dense here.
GPT3 = {
    "gpt3-125m": _gpt(12, 768, 12, batch=256, lr=6e-4, tokens=300e9),
    "gpt3-350m": _gpt(24, 1024, 16, batch=256, lr=3e-4, tokens=300e9),
    "gpt3-760m": _gpt(24, 1536, 16, batch=256, lr=2.5e-4, tokens=300e9),
    "gpt3-1.3b": _gpt(24, 2048, 24, head_width=128, batch=512, lr=2e-4, tokens=300e9),
    "gpt3-2.7b": _gpt(32, 2560, 32, batch=512, lr=1.6e-4, tokens=300e9),
    "gpt3-6.7b": _gpt(32, 4096, 32, batch=1024, lr=1.2e-4, tokens=300e9),
    "gpt3-13b": _gpt(40, 5140, 40, head_width=128, batch=1024, lr=1e-4, tokens=300e9),
    "gpt3-175b": _gpt(96, 12288, 96, batch=1536, lr=0.6e-4, tokens=300e9, micro=1, recompute="full"),
}


def _sc21(layers: int, width: int, heads: int, *, batch: int, lr: float, micro: int) -> RunConfig:
    return _gpt(layers, width, heads, batch=batch, lr=lr, tokens=300e9, vocab=51200, micro=micro, recompute="full")


def _h100(layers: int, width: int, heads: int, *, batch: int, lr: float) -> RunConfig:
    return _gpt(layers, width, heads, batch=batch, lr=lr, tokens=300e9, vocab=131072, seq=4096, micro=1, tied=False)


MEGATRON = {
    # arXiv 2104.04473, table 1; micro batches from Megatron-LM's script for it.
    "megatron-1.7b": _sc21(24, 2304, 24, batch=512, micro=16, lr=2e-4),
    "megatron-3.6b": _sc21(30, 3072, 32, batch=512, micro=16, lr=1.6e-4),
    "megatron-7.5b": _sc21(36, 4096, 32, batch=512, micro=16, lr=1.2e-4),
    "megatron-39.1b": _sc21(48, 8192, 64, batch=1536, micro=4, lr=1e-4),
    "megatron-145.6b": _sc21(80, 12288, 96, batch=2304, micro=2, lr=0.6e-4),
    "megatron-1008b": _sc21(128, 25600, 160, batch=3072, micro=1, lr=0.6e-4),
    # Megatron-LM's README of 2026, on H100s; the names count the head beside the embedding.
    "megatron-h100-1.7b": _h100(24, 2048, 16, batch=192, lr=2e-4),
    "megatron-h100-16b": _h100(32, 6144, 48, batch=192, lr=1e-4),
    "megatron-h100-70b": _h100(84, 8192, 64, batch=384, lr=1e-4),
    "megatron-h100-177b": _h100(96, 12288, 96, batch=1152, lr=0.6e-4),
    "megatron-h100-462b": _h100(112, 18432, 144, batch=3072, lr=0.6e-4),
}

# Hugging Face's SmolLM2-135M (arXiv 2502.02737): WSD, its last fifth falling; 20 B tokens here.
SMOLLM2 = RunConfig(
    model=dataclasses.replace(
        DEMO.model, layers=30, width=576, heads=9, kv_heads=3, vocab=49152, seq=2048, rope_base=1e5
    ),
    global_batch=512,
    micro_batch=8,
    lr=3e-3,
    min_lr=0.0,
    lr_schedule="wsd",
    warmup=2000,
    steps=20_000,
    eval_every=1000,
    save_every=1000,
)

PRESETS: dict[str, RunConfig] = {"demo": DEMO, **GPT2, **GPT3, **MEGATRON, "smollm2-135m": SMOLLM2}


def preset(name: str) -> RunConfig:
    """The named run, or the one in a JSON file that jaxgpt wrote (a run folder's config.json).

    Raises UserError with the closest names and all of them, or naming what is wrong with the file.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix == ".json" or path.is_file():
        return stored(path)
    family = [known for known in PRESETS if name and known.startswith(name)]
    close = family or difflib.get_close_matches(name.lower(), PRESETS, n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise UserError(f"--preset {name}: no such preset; {hint}known are {', '.join(PRESETS)}, or a .json file")


def stored(path: Path) -> RunConfig:
    """The configuration in a JSON file. Raises UserError where it cannot be read or is not one."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: no configuration can be read there ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a configuration of jaxgpt (not UTF-8)") from None
    return from_json(text, str(path))
