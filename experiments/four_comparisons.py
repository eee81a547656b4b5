"""The four comparisons of OneFlow's article on GPT: pure data, pure tensor, hybrid, and pipeline with hybrid
parallelism, the same model and batches on eight virtual devices.

    python experiments/four_comparisons.py TEXT [--steps 30]

Of each: tokens a second, bytes that a device receives in a step (the ledger, by mesh axis), memory of a device as
compiled, the pipeline's bubble, and the loss of every step, which must be one curve for all. Each runs in a process of
its own, and they step in turn. Eight devices share the cores of one machine, so the times compare what the four cost in
all, not how fast links are.
"""

import argparse
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib as mpl
from _bench import Contestant, Sample, own_output, quartiles, serve

mpl.use("agg")
from matplotlib import pyplot as plt

RESULTS = Path(__file__).parent / "results"
DEVICES = 8
CASES = {
    "data": "data=8",
    "tensor": "tensor=8",
    "hybrid": "data=4,tensor=2",
    "pipeline and hybrid": "pipe=2,data=2,tensor=2",
}
SHAPE = {"layers": 4, "width": 256, "heads": 8, "seq": 128}
BATCH = 16
ALLOWED = 1e-5
"""Largest relative difference of a loss from that of pure data parallelism."""


def run(text: str, mesh_text: str, steps: int) -> None:
    """A process: one of the cases. Its first step compiles alone."""
    answers = own_output()
    import jax
    import numpy as np

    from jaxgpt import ModelConfig, RunConfig, use_devices
    from jaxgpt.data import open_dataset
    from jaxgpt.data.loader import training_batch
    from jaxgpt.planner.pipeline import Pipeline
    from jaxgpt.sharding import mesh
    from jaxgpt.sharding.ledger import ledger, totals
    from jaxgpt.training.program import Program

    use_devices(DEVICES)
    with TemporaryDirectory() as cache:
        dataset = open_dataset(text, "chars", 256, 0.1, Path(cache))
        tokens, vocab = np.array(dataset.train), dataset.tokenizer.size
    model = ModelConfig(vocab=vocab, **SHAPE)
    config = RunConfig(model=model, global_batch=BATCH, dtype="fp32", mesh=mesh_text, steps=steps, warmup=5, lr=1e-3)
    sizes = mesh.parse(mesh_text)
    mesh.check(config, sizes)
    program = Program(config, mesh.build(sizes, jax.devices()))
    memory, pipeline = program.compiled.memory_analysis(), Pipeline.of(program)
    received: dict[str, float] = {}
    for (_, axes), total in totals(ledger(program.traced.jaxpr, sizes)).items():
        name = " x ".join(axes)
        received[name] = received.get(name, 0.0) + float(total.received)
    about = {
        "received": received,
        "state": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "bubble": 0.0 if pipeline is None else pipeline.idle_share,
        "jax": jax.__version__,
    }
    state, done = None, 0

    def step() -> float:
        nonlocal state, done
        if state is None:
            state = program.init()
            return 0.0
        samples = training_batch(tokens, model.seq, config.seed, done * BATCH, BATCH)
        state, metrics = program.step(state, program.place({"inputs": samples[:, :-1], "targets": samples[:, 1:]}))
        done += 1
        return float(metrics["loss"])

    serve(step, about, answers)


def measured(text: str, steps: int) -> dict[str, dict[str, Any]]:
    """Name of each case -> what was found."""
    command = [sys.executable, __file__, text, "--steps", str(steps), "--mesh"]
    cases = {name: Contestant(name, [*command, mesh]) for name, mesh in CASES.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in cases}
    for _ in range(steps):
        for name, case in cases.items():
            samples[name].append(case.step())
    for case in cases.values():
        case.close()
    found = {}
    for name, case in cases.items():
        times = quartiles(samples[name][1:])
        found[name] = {
            "mesh": CASES[name],
            "tokens a second": round(BATCH * SHAPE["seq"] / times.median),
            "milliseconds a step, quartiles": [round(1e3 * t, 1) for t in (times.first, times.median, times.third)],
            "received by a device in a step, bytes": case.about["received"],
            "state of a device, bytes": case.about["state"],
            "temporary on a device, bytes": case.about["temporary"],
            "bubble": case.about["bubble"],
            "loss": [sample.loss for sample in samples[name]],
            "jax": case.about["jax"],
        }
    return found


def picture(found: dict[str, dict[str, Any]], file: Path) -> None:
    """Four panels."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    names = list(found)
    labels = [f"{name}\n{CASES[name]}" for name in names]
    speed, sent, memory, loss = axes.flat
    speed.bar(labels, [found[n]["tokens a second"] for n in names])
    speed.set(title="tokens a second, eight virtual devices")
    _stacked(sent, labels, [found[n]["received by a device in a step, bytes"] for n in names])
    sent.set(title="received by a device in a step, MiB")
    kinds = ("state of a device, bytes", "temporary on a device, bytes")
    _stacked(memory, labels, [{kind: found[n][kind] for kind in kinds} for n in names])
    memory.set(title="memory of a device, MiB")
    for name, width in zip(names, (6, 4, 2.5, 1), strict=True):
        loss.plot(range(1, len(found[name]["loss"]) + 1), found[name]["loss"], linewidth=width, label=name)
    loss.set(title="loss of each step, nats a character", xlabel="step")
    loss.legend()
    for each in (speed, sent, memory):
        each.tick_params(axis="x", labelsize=8)
    figure.savefig(file, dpi=120)


def _stacked(axes: Any, labels: list[str], rows: list[dict[str, float]]) -> None:
    bottom = [0.0] * len(rows)
    for part in dict.fromkeys(part for row in rows for part in row):
        heights = [row.get(part, 0.0) / 2**20 for row in rows]
        axes.bar(labels, heights, bottom=bottom, label=part.removesuffix(", bytes"))
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.legend(fontsize=8)


def main() -> int:
    """Measures, prints, and keeps result and figure beside this file; 1 where the losses are not one curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--mesh", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.mesh:
        run(given.text, given.mesh, given.steps)
        return 0
    found = measured(given.text, given.steps)
    base = found["data"]["loss"]
    apart = max(abs(a - b) / b for case in found.values() for a, b in zip(case["loss"], base, strict=True))
    result = {
        "command": shlex.join(["python", sys.argv[0], Path(given.text).name, *sys.argv[2:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {"jax": next(iter(found.values())).pop("jax"), "python": platform.python_version()},
        "model": SHAPE | {"batch": BATCH},
        "largest relative difference of a loss": apart,
        "cases": {name: {key: x for key, x in case.items() if key != "jax"} for name, case in found.items()},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "four_comparisons.json").write_text(json.dumps(result, indent=1) + "\n")
    picture(found, RESULTS / "four_comparisons.png")
    shown = {name: {key: x for key, x in case.items() if key != "loss"} for name, case in result["cases"].items()}
    print(json.dumps(result | {"cases": shown}, indent=1))
    return int(apart > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
