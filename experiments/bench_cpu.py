"""Tokens a second on CPU: this trainer on one device against Hugging Face's GPT-2 in torch, step by step in turn.

    python experiments/bench_cpu.py text.txt [--torch-python torch-env/bin/python] [--vocab 256,50257] [--steps 20]

6 layers, 6 heads, width 384, context 256, batch 12, fp32, AdamW, no dropout; tokens are the bytes of the text for both
vocabularies, of which the larger costs the same whatever its tokens are. Both use every core. The trainer's side is
the train step that `jaxgpt train` runs, with its clipping and its metrics. Hugging Face's has what makes it fastest:
sdpa attention, fused AdamW, gradients set to None.

Times to the first step are of the whole process, imports included, with an empty and with a filled compilation cache.
"""

import argparse
import json
import os
import platform
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _bench import Contestant, Quartiles, in_turn, quartiles, serve

HERE = Path(__file__).parent / "results"
LAYERS, HEADS, WIDTH, SEQ, BATCH = 6, 6, 384, 256, 12
TARGETS = {256: 1.2, 50257: 1.55}
"""Tokens a second over Hugging Face's."""
OURS, PLAIN, THEIRS = "jaxgpt", "plain memory", "Hugging Face"
"""PLAIN: the trainer again, with memory as glibc and the kernel manage it by themselves (jaxgpt/host_memory.py)."""


def sampler(text: str) -> Callable[[], list[list[int]]]:
    """Draws [BATCH, SEQ + 1] tokens, the text's bytes, the same ones in every process."""
    data, draw = Path(text).read_bytes(), random.Random(0)
    starts = range(len(data) - SEQ)
    return lambda: [list(data[s : s + SEQ + 1]) for s in (draw.choice(starts) for _ in range(BATCH))]


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_ours(text: str, vocab: int, plain: bool) -> None:
    """The process of this trainer."""
    import jax
    import numpy as np

    from jaxgpt import ModelConfig, RunConfig, host_memory
    from jaxgpt.sharding import mesh
    from jaxgpt.training.program import Program

    if plain:
        host_memory.keep = lambda devices=1: False
    devices, _ = mesh.prepare_devices(1)
    model = ModelConfig(layers=LAYERS, heads=HEADS, width=WIDTH, seq=SEQ, vocab=vocab)
    config = RunConfig(model=model, global_batch=BATCH, dtype="fp32", mesh="data=1", warmup=0)
    program = Program(config, mesh.build(mesh.parse(config.mesh, 1), devices))
    state, batch = program.init(), sampler(text)

    def step() -> float:
        nonlocal state
        tokens = np.array(batch(), np.int32)
        state, metrics = program.step(state, program.place({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}))
        return float(jax.device_get(metrics)["loss"])

    serve(step, {"jax": jax.__version__, "python": platform.python_version()})


def run_theirs(text: str, vocab: int) -> None:
    """The process of Hugging Face's model, in an environment that has torch."""
    import torch
    import transformers

    torch.set_num_threads(cores())
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=WIDTH,
        n_positions=SEQ,
        vocab_size=vocab,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batch = sampler(text)

    def step() -> float:
        # One token more than it is given: it predicts all but the first of its input.
        tokens = torch.tensor(batch())[:, :SEQ]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    serve(step, versions | {"python": platform.python_version()})


def check_torch(python: str) -> None:
    """Ends with what to install where the interpreter has no torch."""
    asked = subprocess.run([python, "-c", "import torch, transformers"], capture_output=True, text=True)
    if asked.returncode:
        sys.exit(
            f"--torch-python {python}: torch and transformers cannot be imported there "
            f"({(asked.stderr.strip().splitlines() or ['no message'])[-1]}); in an environment of their own:\n"
            "  python3 -m venv torch-env\n"
            "  torch-env/bin/pip install torch transformers\n"
            "then: --torch-python torch-env/bin/python"
        )


def measure(given: argparse.Namespace, vocab: int) -> dict[str, Any]:
    """Both, at one vocabulary."""

    def ours(cache: str, which: str = OURS) -> Contestant:
        return Contestant(which, command(sys.executable, which), {"JAX_COMPILATION_CACHE_DIR": cache})

    def command(python: str, which: str) -> list[str]:
        return [python, __file__, given.text, "--vocab", str(vocab), "--serve", which]

    with TemporaryDirectory() as cache:
        first = ours(cache)
        first.close()
        jaxgpt, plain = ours(cache), ours(cache, PLAIN)
        theirs = Contestant(THEIRS, command(given.torch_python, THEIRS))
        samples, quiet = in_turn([jaxgpt, plain, theirs], given.steps, given.warm_up, given.most)
        for contestant in (jaxgpt, plain, theirs):
            contestant.close()
    found = {name: quartiles(each) for name, each in samples.items()}
    return {
        "vocabulary": vocab,
        "steps": given.steps,
        "quiet": quiet,
        "ratio": found[THEIRS].median / found[OURS].median,
        "target": TARGETS.get(vocab),
        "milliseconds": {name: _rounded(q) for name, q in found.items()},
        "tokens a second": {name: round(BATCH * SEQ / q.median) for name, q in found.items()},
        "seconds to the first step": {
            f"{OURS}, first start": round(first.first_step, 1),
            f"{OURS}, second start": round(jaxgpt.first_step, 1),
            THEIRS: round(theirs.first_step, 1),
        },
        "versions": {OURS: jaxgpt.about, THEIRS: theirs.about},
    }


def _rounded(q: Quartiles) -> list[float]:
    return [round(1e3 * seconds, 1) for seconds in (q.first, q.median, q.third)]


def report(result: dict[str, Any]) -> None:
    """Prints what was measured at one vocabulary."""
    load = "quiet steps" if result["quiet"] else "steps, and others used the machine meanwhile: measure again"
    print(f"\nvocabulary {result['vocabulary']}: {result['steps']} {load}")
    print(f"  {'':14}{'tokens/s':>10}{'ms, median':>12}{'quartiles':>18}")
    for name, (first, median, third) in result["milliseconds"].items():
        print(f"  {name:14}{result['tokens a second'][name]:10,}{median:12.1f}{f'{first:.1f} {third:.1f}':>18}")
    target = "" if result["target"] is None else f"; the target is {result['target']}"
    print(f"  ratio: {result['ratio']:.3f}{target}")
    starts = ", ".join(f"{name} {seconds} s" for name, seconds in result["seconds to the first step"].items())
    print(f"  to the first step: {starts}", flush=True)


def machine() -> str:
    """The processor by its name, and how many cores are used."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {cores()} cores, {platform.system()}"


def main() -> None:
    """Measures, prints, and keeps the result beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file")
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has torch and transformers")
    parser.add_argument("--vocab", default="256,50257")
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--most", type=int, default=100, help="rounds run to find as many quiet ones")
    parser.add_argument("--serve", choices=(OURS, PLAIN, THEIRS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    vocabularies = [int(size) for size in given.vocab.split(",")]
    if given.serve:
        if given.serve == THEIRS:
            run_theirs(given.text, *vocabularies)
        else:
            run_ours(given.text, *vocabularies, plain=given.serve == PLAIN)
        return
    if not Path(given.text).is_file() or Path(given.text).stat().st_size <= SEQ:
        sys.exit(f"{given.text}: not a text file of more than {SEQ} bytes")
    if given.steps < 2:
        sys.exit(f"--steps {given.steps}: quartiles need at least 2")
    check_torch(given.torch_python)
    names = {given.text: Path(given.text).name, given.torch_python: "torch-env/bin/python"}  # not this machine's paths
    called = shlex.join(["python", *(names.get(word, word) for word in sys.argv)])
    print(f"{called}\n{machine()}")
    results = []
    for vocab in vocabularies:
        results.append(measure(given, vocab))
        if len(results) == 1:
            print(json.dumps(results[0]["versions"]))
        report(results[-1])
    HERE.mkdir(exist_ok=True)
    kept = {"command": called, "machine": machine(), "results": results}
    (HERE / "bench_cpu.json").write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
