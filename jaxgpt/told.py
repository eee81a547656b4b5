"""Plans and explanations in a notebook: the tables that the command line prints, as values that show themselves."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxgpt import explained
from jaxgpt.config import RunConfig
from jaxgpt.planner import report
from jaxgpt.planner.choose import here, search
from jaxgpt.planner.hardware import find
from jaxgpt.sharding import mesh
from jaxgpt.sharding.drawing import html_table, plain_rows
from jaxgpt.training.console import Rows


@dataclass(frozen=True, repr=False)
class Told:
    """Tables, and what they were made from: an explained.Explanation or a planner.search.Ranking."""

    found: Any
    tables: Sequence[tuple[str, Rows]]

    def __repr__(self) -> str:
        return "\n".join(
            line for title, rows in self.tables for line in (title, *(f"  {row}" for row in plain_rows(rows)))
        )

    def _repr_html_(self) -> str:
        return "".join(f"<b>{html.escape(title)}</b>{html_table(rows)}" for title, rows in self.tables)


def explain(config: RunConfig) -> Told:
    """What jaxgpt explain says of a configuration: where every array lies on its mesh, what is kept and what is sent.
    No device is needed. Raises UserError where the mesh does not fit."""
    found = explained.explain(config)
    return Told(found, explained.tables(found))


def plan(config: RunConfig, devices: int | None = None, hardware: str | None = None, top: int = 5) -> Told:
    """What jaxgpt plan says: the fastest plans of a configuration, whose own mesh does not matter.

    devices, hardware: how many of which kind; None: all that are here. `found.plans[0].plan.apply(config)` is the
    configuration on the best of them. Raises UserError where no plan is legal or none fits.
    """
    present, _ = mesh.prepare_devices(None if hardware is None else 1)
    kind = here(config, present, measured=False) if hardware is None else find(hardware)
    found = search(config, kind, devices or len(present), top=top)
    return Told(found, report.tables(found, float(config.steps * config.global_batch * config.model.seq)))
