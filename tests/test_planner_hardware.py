"""Hardware as data: the table, a user's own file, and devices that are present."""

import json
import re
from types import SimpleNamespace

import pytest

from jaxgpt.errors import UserError
from jaxgpt.planner import absent
from jaxgpt.planner.hardware import find, present, table

MINE = """
kind = "mine"
tflops = { bf16 = 100, fp32 = 50 }
memory = 1_000_000_000
bandwidth = 1e12
units = 64
gap = 1e-6
host = 4
inside = { bandwidth = 1e11, latency = 1e-6 }
between = { bandwidth = 1e10, latency = 1e-5 }
efficiency = { products = 0.8, attention = 0.5, memory = 0.8, inside = 0.9, between = 0.9 }
"""


def test_known_hardware():
    assert {"v100-16gb", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "cpu"} <= set(table())
    assert find("h100").peak("bf16") == 989e12
    for name, gpu in absent.GPUS.items():  # what is compiled for has the memory that is planned with
        ours = find({"a100": "a100-80gb"}.get(name, name))
        assert (ours.memory, ours.units) == (gpu.memory, gpu.multiprocessors)
        assert re.fullmatch(ours.kind, gpu.name)


def test_unknown_hardware_is_refused_with_what_is_known():
    with pytest.raises(UserError, match=r"--hardware a100: not known; did you mean a100-40gb or a100-80gb\?.*h200"):
        find("a100")


def test_own_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    found = find(str(path))
    assert (found.tflops.bf16, found.host, found.inside.bandwidth, found.pairwise) == (100, 4, 1e11, False)
    as_json = tmp_path / "mine.json"
    as_json.write_text(json.dumps({"one": found.to_json(), "other": found.to_json() | {"host": 2}}))
    assert find(f"{as_json}:other").host == 2
    with pytest.raises(UserError, match=r"mine.json: must name one of its tables \(one, other\), as .*mine.json:NAME"):
        find(str(as_json))
    with pytest.raises(UserError, match=r"mine.json:third: must name one of its tables"):
        find(f"{as_json}:third")
    as_json.write_text('{"name": "mine"}')
    with pytest.raises(UserError, match=r"mine.json: has neither tflops, as one device's fields do, nor tables"):
        find(str(as_json))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("memory = 1_000_000_000", "", r"mine.toml: memory missing"),
        ("memory =", "memroy =", r"mine.toml: unknown memroy; did you mean memory\?"),
        ("units = 64", "units = 6.5", r"units 6.5: must be a whole number"),
        ("units = 64", "units = 0", r"units 0: must be a number above 0"),
        ("gap = 1e-6", 'gap = "short"', r'gap "short": must be a number above 0'),
        ("products = 0.8", "products = 1.8", r"mine.toml, efficiency: products 1.8: .* at most 1"),
        ("inside = { bandwidth = 1e11, latency = 1e-6 }", "inside = 3", r"inside 3: must be a table of its own"),
        ("fp32 = 50", "fp32 = inf", r"mine.toml, tflops: fp32 Infinity: must be a number"),
        ('kind = "mine"', "kind = 3", r"kind 3: must be a text"),
        ("host = 4", "host 4", r"mine.toml: not TOML \("),
    ],
)
def test_broken_file_is_refused_in_one_line(tmp_path, before, after, said):
    assert before in MINE
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace(before, after, 1))
    with pytest.raises(UserError, match=said) as error:
        find(str(path))
    assert "\n" not in str(error.value)


def test_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"none.toml: cannot be read \(No such file"):
        find(str(tmp_path / "none.toml"))


def test_present_devices():
    card = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", process_index=0)
    assert present([card] * 4).host == 4
    virtual = SimpleNamespace(device_kind="cpu", process_index=0)
    one, eight = present([virtual]), present([virtual] * 8)
    assert one.name == "cpu"
    assert one.memory // 8 == eight.memory  # shares of the same
    with pytest.raises(UserError, match="of the kind 'Abacus' are not in the table"):
        present([SimpleNamespace(device_kind="Abacus", process_index=0)])
