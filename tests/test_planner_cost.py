"""The terms of the cost model: shapes, links, and communication held against the ledger of the traced step."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxgpt.config import ModelConfig
from jaxgpt.planner.estimate import estimate
from jaxgpt.planner.hardware import Link, find
from jaxgpt.planner.kernels import Kernels, shape_efficiency
from jaxgpt.planner.links import group
from jaxgpt.planner.plan import Plan
from jaxgpt.planner.practice import JAXGPT
from jaxgpt.presets import preset
from jaxgpt.sharding.mesh import parse

H100 = find("h100")
FREE = Link(bandwidth=1e30, latency=1e-30)
LEDGER = json.loads((Path(__file__).parents[1] / "experiments" / "results" / "ledger_h100.json").read_text())


def test_tiles_that_fill_no_wave_cost_what_a_full_one_does():
    full = shape_efficiency(132, 256 * 12, 128 * 11)
    assert full == 1
    assert shape_efficiency(132, 256 * 12, 128 * 11 + 1) < 0.9
    assert shape_efficiency(132, 64, 64) < 0.01


def test_product_is_bounded_by_what_it_reads():
    kernels = Kernels(H100, "bf16")
    bytes_a_second = H100.bandwidth * H100.efficiency.memory
    assert kernels.product(1, 8192, 8192) == pytest.approx(2 * 8192**2 / bytes_a_second, rel=1e-2)
    large = 2 * 16384**3 / kernels.product(16384, 16384, 16384)
    assert 0.9 < large / (989e12 * H100.efficiency.products) <= 1
    assert kernels.product(4096, 4096, 128) > kernels.product(4096, 4096, 4096) / 32  # less of it pays for the writing


def test_links_of_a_group():
    sizes = parse("pipe=4,data=4,tensor=8")
    inside, across = H100.inside.bandwidth * 0.8, H100.between.bandwidth * 0.85
    assert group(H100, sizes, ("tensor",)).bandwidth == pytest.approx(inside)
    assert group(H100, sizes, ("data",)).bandwidth == pytest.approx(across)
    assert group(H100, sizes, ("data",)).hosts == 4
    half = group(H100, parse("data=16,tensor=4"), ("data",))  # two members in each host
    assert (half.hosts, half.bandwidth) == (8, pytest.approx(2 * across))
    assert group(H100, sizes, ("context",)).all_reduce(1e9) == 0
    few, many = (group(find("v100-16gb"), parse(f"tensor={n}"), ("tensor",)) for n in (2, 8))
    assert few.bandwidth < many.bandwidth / 3  # single links between pairs


def test_small_sums_go_by_a_tree():
    many = group(H100, parse("data=1024"), ("data",))
    assert many.all_reduce(8) < 2 * 1023 * H100.inside.latency
    assert many.all_reduce(1e10) == pytest.approx(2 * 1e10 / many.bandwidth, rel=0.05)


@pytest.mark.parametrize("row", LEDGER["rows"], ids=lambda row: f"{row['model']} {row['name']} {row['mesh']}")
def test_communication_is_the_ledgers(row):
    """With links of a byte a second and no latency, seconds are the bytes that a device receives."""
    name = {"GPT-2 124M": "gpt2-124m", "GPT-3 175B, 4 layers": "gpt3-175b"}[row["model"]]
    base = preset(name)
    model = base.model if name == "gpt2-124m" else dataclasses.replace(base.model, layers=4)
    sizes, one = parse(row["mesh"]), Link(bandwidth=1.0, latency=1e-30)
    hardware = dataclasses.replace(
        H100,
        inside=one,
        between=one,
        efficiency=dataclasses.replace(H100.efficiency, inside=1.0, between=1.0),
        host=sizes["pipe"] * 8,
    )
    nothing_hides = dataclasses.replace(JAXGPT, hidden_weights=0.0)
    settings = {"context_attention": "gather" if sizes["pipe"] > 1 else "ring"} | row["settings"]
    plan = Plan(**sizes, micro_batch=base.micro_batch, recompute=base.recompute, **settings)
    batch = (8 if sizes["pipe"] > 1 else 2) * plan.replicas * plan.micro_batch
    found = estimate(model, plan, hardware, batch, nothing_hides)
    ours = sum(found.time.exposed.values())
    theirs = sum(line["predicted"] for line in row["collectives"])
    assert ours == pytest.approx(theirs, rel=0.03)


def test_pipeline_idles_as_its_table_does():
    """Links that cost nothing, a model whose ends are small: the bubble is the schedule's share."""
    model = ModelConfig(layers=16, width=4096, heads=32, vocab=512, seq=2048)
    free = dataclasses.replace(H100, inside=FREE, between=FREE)
    for schedule, chunks, share in (("1f1b", 1, 3 / 11), ("gpipe", 1, 3 / 11), ("interleaved", 2, 3 / 19)):
        plan = Plan(pipe=4, micro_batch=1, schedule=schedule, virtual_stages=chunks)
        found = estimate(model, plan, free, 8).time
        assert found.bubble / (found.bubble + found.computation) == pytest.approx(share, rel=0.02)


def test_more_of_what_helps_helps():
    model = preset("gpt3-6.7b").model
    plan = Plan(data=8, tensor=4, micro_batch=2, recompute="full")
    base = estimate(model, plan, H100, 128)
    faster = dataclasses.replace(H100, between=Link(bandwidth=400e9, latency=1e-6))
    assert estimate(model, plan, faster, 128).step_seconds < base.step_seconds
    assert estimate(model, dataclasses.replace(plan, recompute="none"), H100, 128).step_seconds < base.step_seconds
    sharded = estimate(model, dataclasses.replace(plan, zero=1), H100, 128)
    assert sharded.peak_bytes < base.peak_bytes
    assert sharded.time.optimizer < base.time.optimizer
