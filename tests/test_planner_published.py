"""The cost model against published figures, and the formulas by which those were counted."""

import importlib.util
from pathlib import Path

import pytest

from jaxgpt.config import ModelConfig
from jaxgpt.planner.flops import flops_per_token, keys, megatron_hardware, megatron_model, recomputed_per_token
from jaxgpt.planner.hardware import table

SCRIPT = Path(__file__).parents[1] / "experiments" / "published_rows.py"
SPEC = importlib.util.spec_from_file_location("published_rows", SCRIPT)
rows = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(rows)

DLPERF = ModelConfig(layers=16, width=1536, heads=16, seq=2048, vocab=51200)


def test_every_row_is_within_its_bound():
    found = rows.tables()
    assert [len(each) for each in found.values()] == [6, 5, 20, 7]
    assert rows.failures(found) == []


def test_what_is_out_of_bounds_is_told():
    good = {"row": "a", "published": 100.0, "predicted": 101.0, "error": 0.01, "family": "f", "system": "oneflow"}
    bad = good | {"row": "b", "published": 50.0, "predicted": 102.0, "error": 1.04}
    found = {name: [good] for name in ("megatron_sc21", "megatron_h100", "dlperf_gpt memory")}
    said = rows.failures(found | {"dlperf_gpt": [good, bad]})
    assert said == ["dlperf_gpt b: +104.0%", "a before b (oneflow)"]


def test_constants_are_of_a_chip_and_few_rows_are_fitted():
    assert set(rows.FITTED) <= set(table())
    assert all(1 <= len(fitted) <= 3 for fitted in rows.FITTED.values())
    shared = {(each.efficiency.memory, each.efficiency.inside) for name, each in table().items() if name != "cpu"}
    assert len(shared) == 1


def test_hardware_flops_of_the_dlperf_report():
    assert megatron_hardware(DLPERF, 2) / 0.46412 / 1e12 == pytest.approx(43.25, abs=0.01)


def test_formulas_differ_by_causality_and_recomputation():
    tokens, attention = 2 * DLPERF.seq, 12 * DLPERF.layers * DLPERF.width * DLPERF.seq
    ours = tokens * (flops_per_token(DLPERF) + attention * (1 - keys(DLPERF) / DLPERF.seq))
    assert ours == pytest.approx(megatron_model(DLPERF, 2))
    blocks = megatron_model(DLPERF, 2) - tokens * 6 * DLPERF.width * DLPERF.vocab
    assert megatron_hardware(DLPERF, 2) == pytest.approx(megatron_model(DLPERF, 2) + blocks / 3)
    assert recomputed_per_token(DLPERF, "none") == recomputed_per_token(DLPERF, "selective") == 0
    assert 0 < recomputed_per_token(DLPERF, "full") < blocks / 3 / tokens
