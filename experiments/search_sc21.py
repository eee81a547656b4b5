"""The search for each row of Megatron-LM's table of 2021 (arXiv 2104.04473, table 1), against the published plan.

    python experiments/search_sc21.py

For as many A100s as published, the same model and global batch: the fastest plan that fits must be predicted at least
as fast as the published one, which must be among the plans that are searched; and the search over 3072 devices must
take under ten seconds of one core. Both are predicted for jaxgpt. Takes half a minute.
"""

import argparse
import json
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from published_rows import gpt, published, sc21_plan

from jaxgpt import RunConfig
from jaxgpt.planner.choose import search
from jaxgpt.planner.estimate import estimate
from jaxgpt.planner.hardware import find
from jaxgpt.planner.report import choices
from jaxgpt.sharding.mesh import format_mesh

RESULT = Path(__file__).parent / "results" / "search_sc21.json"
HARDWARE = "a100-80gb"
SECONDS = 10.0
"""Allowed for a search."""


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """The search's best beside the published plan."""
    plan, hardware = sc21_plan(row), find(HARDWARE)
    config = RunConfig(model=gpt(row, 2048, 51200), global_batch=row["global_batch"])
    began = time.process_time()  # others may use the machine; the search runs on one core
    found = search(config, hardware, plan.devices)
    took = time.process_time() - began
    first, published_one = found.plans[0], estimate(config.model, plan, hardware, config.global_batch)
    return {
        "row": row["name"],
        "devices": plan.devices,
        "seconds of the search": round(took, 2),
        "legal plans": found.legal,
        "predictions": found.predicted,
        "best": f"{format_mesh(first.plan.sizes)}: {choices(first)}",
        "published": f"{format_mesh(plan.sizes)}: {choices(published_one)}",
        "step of the best": first.step_seconds,
        "step of the published": published_one.step_seconds,
        "times as fast": published_one.step_seconds / first.step_seconds,
        "best fits": first.fits,
        "published is legal": plan in set(found.space.plans(plan.sizes)),
    }


def main() -> int:
    """Searches, prints, and keeps the result beside this file; 1 where anything is missed."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows, missed = [], []
    for row in published("megatron_sc21"):
        each = compared(row)
        rows.append(each)
        print(json.dumps(each), flush=True)
        good = each["best fits"] and each["published is legal"] and each["times as fast"] >= 1
        if not good or each["seconds of the search"] > SECONDS:
            missed.append(each["row"])
    kept = {
        "command": shlex.join(["python", *sys.argv]),
        "python": platform.python_version(),
        "hardware": HARDWARE,
        "missed": missed,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    print("missed: " + ", ".join(missed) if missed else "all rows hold")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
