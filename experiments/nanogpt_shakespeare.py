"""nanoGPT's CPU setting, one token a character, on a text: the validation loss of three seeds, and one device against a
mesh, step by step.

    python experiments/nanogpt_shakespeare.py tinyshakespeare.txt [--seeds 0,1,2] [--mesh data=2,fsdp=2,tensor=2]

The setting (nanoGPT's README, "I only have a macbook"): 4 layers, 4 heads, width 128, context 64, batch 12, 2000
steps, no dropout, no biases, learning rate 1e-3 to 1e-4 with 100 steps of warm-up, beta2 0.99. It states 1.88 nats,
measured on 20 batches; here every token of the validation part (the last tenth) is read.
"""

import argparse
import json
import platform
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import matplotlib as mpl

from jaxgpt import ModelConfig, RunConfig, train, use_devices
from jaxgpt.sharding.mesh import devices_named
from jaxgpt.training import metrics

mpl.use("agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent / "results"

MODEL = ModelConfig(
    layers=4,
    width=128,
    heads=4,
    seq=64,
    vocab=65,
    activation="gelu",
    norm_bias=False,
    qkv_bias=False,
    attention_bias=False,
    mlp_bias=False,
)


def configuration(text: str, mesh: str, seed: int, steps: int) -> RunConfig:
    """The run; every step's loss is recorded."""
    return RunConfig(
        model=MODEL,
        data=text,
        tokenizer="chars",
        validation=0.1,
        mesh=mesh,
        seed=seed,
        steps=steps,
        global_batch=12,
        lr=1e-3,
        min_lr=1e-4,
        warmup=100,
        beta2=0.99,
        log_every=1,
        eval_every=250,
        save_every=0,
        dtype="fp32",
    )


def losses(config: RunConfig, run: Path) -> tuple[list[float], list[tuple[int, float]], float]:
    """Training loss of every step, (step, loss) of each validation, and the loss over all of the validation part."""
    found = train(config, run)
    records = metrics.read(run)
    steps = [r["loss"] for r in records if r["kind"] == "train"]
    checks = [(r["step"], r["loss"]) for r in records if r["kind"] == "validation"]
    assert found.validation is not None
    return steps, checks, found.validation.loss


def picture(curves: dict[int, list[float]], checks: dict[int, list[tuple[int, float]]], mesh: str, file: Path) -> None:
    """Loss of each seed, and the relative difference of the mesh from one device."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for seed, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve, linewidth=0.4, alpha=0.5)
        axes.plot(*zip(*checks[seed], strict=True), "o-", markersize=3, label=f"seed {seed}, validation")
    axes.axhline(1.88, color="black", linestyle=":", label="1.88, nanoGPT's README")
    axes.set(xlabel="step", ylabel="loss, nats a character", ylim=(1.4, 3), title=f"nanoGPT's CPU setting; {mesh}")
    axes.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Trains, prints, and keeps the result beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--mesh", default="data=2,fsdp=2,tensor=2")
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    use_devices(devices_named(given.mesh) or 1)
    result: dict[str, object] = {
        "command": shlex.join(["python", *sys.argv[:1], Path(given.text).name, *sys.argv[2:]]),
        "machine": f"{platform.processor() or platform.machine()}, {jax.device_count()} {jax.devices()[0].device_kind}",
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
    }
    curves, checks, final = {}, {}, {}
    with TemporaryDirectory() as folder:
        for seed in seeds:
            config = configuration(given.text, "data=1", seed, given.steps)
            curves[seed], checks[seed], final[seed] = losses(config, Path(folder) / f"seed-{seed}")
        split, _, split_final = losses(
            configuration(given.text, given.mesh, seeds[0], given.steps), Path(folder) / "mesh"
        )
    apart = [abs(a - b) / a for a, b in zip(curves[seeds[0]], split, strict=True)]
    result["validation loss by seed"] = final
    result["mean validation loss"] = sum(final.values()) / len(final)
    result["mesh"] = {"mesh": given.mesh, "seed": seeds[0], "validation loss": split_final}
    result["largest relative difference of any step's loss from one device"] = max(apart)
    HERE.mkdir(exist_ok=True)
    (HERE / "nanogpt_shakespeare.json").write_text(json.dumps(result, indent=2) + "\n")
    picture(curves, checks, given.mesh, HERE / "nanogpt_shakespeare.png")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
