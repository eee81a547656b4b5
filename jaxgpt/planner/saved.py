"""A plan as a file: what jaxgpt plan --save writes, and train --plan reads."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from jaxgpt.config import RunConfig
from jaxgpt.config_file import differences, from_json
from jaxgpt.errors import UserError
from jaxgpt.planner.plan import CHOSEN, Estimate, Plan

FIELDS = frozenset({"mesh", "context_attention", *CHOSEN})
"""Fields of a run's configuration that a plan says."""


@dataclass(frozen=True)
class Saved:
    """What such a file holds, beside predictions."""

    path: Path
    plan: Plan
    config: RunConfig
    """The run that was planned, on the plan's mesh."""

    def onto(self, base: RunConfig, named: str) -> RunConfig:
        """Another configuration of the same model, on the plan's mesh and with the batch planned for.

        named: the flag that the other one comes from. Raises UserError where the models differ in more than the
        vocabulary, which is the tokenizer's to say.
        """
        vocab = base.model.vocab
        planned = dataclasses.replace(self.config, model=dataclasses.replace(self.config.model, vocab=vocab))
        fields = [one for one in differences(planned, base) if one.startswith("model.")]
        if fields:
            listed = "; ".join(one.removeprefix("model.") for one in fields)
            raise UserError(f"--plan {self.path}: is of another model than {named} ({listed}); leave one of them out")
        return self.plan.apply(dataclasses.replace(base, global_batch=self.config.global_batch))


def write(path: Path, estimate: Estimate, config: RunConfig) -> None:
    """Writes the plan, what is predicted of it, and the run that it is for. Raises UserError where a file is there
    already, or none can be written."""
    document = estimate.to_json() | {"config": dataclasses.asdict(estimate.plan.apply(config))}
    try:
        out = path.open("x", encoding="utf-8")
    except FileExistsError:
        raise UserError(f"--save {path}: is there already; give another name") from None
    except OSError as error:
        raise UserError(f"--save {path}: cannot be written ({error.strerror or error})") from None
    try:
        with out:
            out.write(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UserError(f"--save {path}: cannot be written ({error.strerror or error})") from None


def read(path: Path) -> Saved:
    """Raises UserError, naming the file, where it cannot be read or is not a plan."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--plan {path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:  # of JSON or of UTF-8
        raise UserError(f"--plan {path}: not a plan of jaxgpt ({error}); save one with jaxgpt plan --save") from None
    if not isinstance(document, dict) or not isinstance(document.get("config"), dict):
        raise UserError(f"--plan {path}: not a plan of jaxgpt (without config); save one with jaxgpt plan --save")
    plan = Plan.from_json(document, f"--plan {path}")
    return Saved(path, plan, plan.apply(from_json(json.dumps(document["config"]), f"--plan {path}")))
