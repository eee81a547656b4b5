"""What a compiled pipeline computes: the model's products, no more, whatever the schedule."""

import math

import pytest
from quickly import unoptimized
from tiny import run_config

from jaxgpt.config import ModelConfig
from jaxgpt.model.parameters import parameters
from jaxgpt.sharding.hlo_products import flops
from jaxgpt.training import parity

MODEL = ModelConfig(layers=4, width=64, heads=4, vocab=128, seq=16, tied=False)
STEP = {"global_batch": 16, "micro_batch": 2}
pytestmark = pytest.mark.core


def by_formula(model: ModelConfig, tokens: int) -> float:
    """Forward 2 and backward 4 a token and parameter of each matrix that is multiplied with; attention's scores and
    their product with the values, forward, and backward with the scores once more, as its kernels do (arXiv
    2205.14135): 2 and 5 products of queries x keys x width."""
    matrices = sum(
        math.prod(p.shape)
        for name, p in parameters(model).items()
        if "embed" in p.dims and not name.startswith("embedding.")
    )
    attention = 7 * 2 * model.seq * model.heads * model.head * model.layers
    return tokens * (6 * matrices + attention)


@pytest.mark.parametrize(
    ("pipe", "settings"),
    [
        (1, {}),
        (2, {"schedule": "1f1b"}),
        (4, {"schedule": "gpipe"}),
        (2, {"schedule": "interleaved", "virtual_stages": 2}),
        (4, {"schedule": "zero-bubble"}),
    ],
)
def test_nothing_is_computed_twice(pipe: int, settings: dict[str, object]) -> None:
    program = parity.program(run_config(MODEL, **STEP, **settings), f"pipe={pipe}")
    with unoptimized():
        found = flops(program.compiled.as_text())
    assert found == pytest.approx(by_formula(MODEL, 16 * MODEL.seq) / pipe, rel=0.03)


def test_full_recomputation_is_a_forward_more() -> None:
    program = parity.program(run_config(MODEL, **STEP, recompute="full"), "pipe=2")
    with unoptimized():
        found = flops(program.compiled.as_text())
    assert found > 1.2 * by_formula(MODEL, 16 * MODEL.seq) / 2
