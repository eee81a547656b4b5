"""Generation and loading on CPU: tokens a second against transformers' generate, a model loaded against its file read.

    python experiments/bench_generation.py [--torch-python torch-env/bin/python] [--rounds 7] [--only written,loaded]

Written: the same random weights, exported by jaxgpt and read by both, fp32, greedy, 128 tokens after prompts of 32,
prompts included, at batch 1 and 8; a GPT-2 of 6 layers and width 384, and a LLaMA of SmolLM2-135M's shape. Both use
every core, in processes of their own, in turn; transformers as it is without being told more: its own cache, sdpa
attention. Both must write the same tokens.

Loaded: `jaxgpt.load` of a LLaMA of 1 GB in fp32 onto one device, and onto two (tensor=2), every matrix transposed on
the way as its layout here asks for, against numpy.fromfile of the same file; both from the page cache, in turn.

Takes about ten minutes on two cores and 4 GB of disk and memory.
"""

import argparse
import hashlib
import json
import platform
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _bench import Contestant, in_turn, quartiles, serve
from bench_cpu import check_torch, cores, machine

RESULT = Path(__file__).parent / "results" / "bench_generation.json"
PROMPT, TOKENS = 32, 128
OURS, THEIRS = "jaxgpt", "transformers"
LLAMA: dict[str, Any] = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "norm_bias": False,
    "activation": "silu",
    "gated": True,
    "qkv_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2, 6 layers of 384": {"layers": 6, "heads": 6, "width": 384, "seq": 256, "vocab": 50257},
    "llama, SmolLM2-135M's shape": LLAMA
    | {"layers": 30, "heads": 9, "kv_heads": 3, "width": 576, "mlp_width": 1536, "seq": 256, "vocab": 49152},
}
LOADED = LLAMA | {"layers": 15, "heads": 16, "width": 1024, "seq": 256, "vocab": 32000, "tied": False}
MESHES = ("data=1", "tensor=2")
TARGETS = {"written": 1.2, "loaded": 2.0}
"""Least ratio of tokens a second, and most ratio of seconds."""


def make(folder: Path, fields: dict[str, Any]) -> None:
    """A folder with random weights."""
    from jaxgpt import ModelConfig, RunConfig
    from jaxgpt.interop.export import export
    from jaxgpt.sharding import mesh
    from jaxgpt.training.program import Program

    model = ModelConfig(init_std=0.05, **fields)
    program = Program(RunConfig(model=model), mesh.build(mesh.parse("data=1"), mesh.prepare_devices(1)[0]))
    export(folder, model, program.init()["params"], program.in_order, None, {})


def prompts(vocab: int, batch: int) -> list[list[int]]:
    """The same in both processes."""
    return [[(7919 * (row + 1) * (place + 1)) % vocab for place in range(PROMPT)] for row in range(batch)]


def digest(tokens: list[list[int]]) -> float:
    """A number for what was written, in the place of a loss."""
    return float(int(hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12], 16))


def write_ours(folder: str, batch: int) -> None:
    """The process of jaxgpt."""
    import jax

    import jaxgpt
    from jaxgpt.inference.generate import Row, generate
    from jaxgpt.inference.sampling import Sampling

    run = jaxgpt.load(folder)
    writing = run.program.decoding(run.params)
    texts = prompts(run.config.model.vocab, batch)

    def step() -> float:
        rows = [Row(list(text)) for text in texts]
        for _ in generate(writing, rows, run.config.model.seq, TOKENS, Sampling(temperature=0)):
            pass
        return digest([row.written for row in rows])

    serve(step, {"jax": jax.__version__, "python": platform.python_version()})


def write_theirs(folder: str, batch: int) -> None:
    """The process of transformers."""
    import torch
    import transformers

    torch.set_num_threads(cores())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = torch.tensor(prompts(model.config.vocab_size, batch))
    how = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}

    def step() -> float:
        found = model.generate(texts, attention_mask=torch.ones_like(texts), **how)
        return digest(found[:, PROMPT:].tolist())

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    serve(step, versions | {"python": platform.python_version()})


def load(folder: str, mesh: str) -> None:
    """The process that loads."""
    import jax

    import jaxgpt

    jaxgpt.use_devices(2)

    def step() -> float:
        return float(jax.block_until_ready(jaxgpt.load(folder, mesh).params)["final_norm.scale"][0])

    serve(step, {"jax": jax.__version__, "python": platform.python_version()})


def read(folder: str) -> None:
    """The process that reads the file and no more."""
    import numpy as np

    def step() -> float:
        return float(len(np.fromfile(Path(folder) / "model.safetensors", np.uint8)))

    serve(step, {"numpy": np.__version__})


def contestant(name: str, python: str, folder: Path, *rest: str) -> Contestant:
    """A process of this file."""
    return Contestant(name, [python, __file__, "--serve", name, str(folder), *rest])


def compared(these: list[Contestant], given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each, in turn."""
    samples, quiet = in_turn(these, given.rounds, 1, given.most)
    for one in these:
        one.close()
    said = {}
    for name, some in samples.items():
        found = quartiles(some)
        said[name] = [round(seconds, 4) for seconds in (found.first, found.median, found.third)]
    return {
        "quiet": quiet,
        "seconds, quartiles": said,
        "written": {name: sorted({sample.loss for sample in some}) for name, some in samples.items()},
        "versions": {one.name: one.about for one in these},
    }


def written(folder: Path, name: str, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    """Both, for one model and batch."""
    pair = [
        contestant(OURS, sys.executable, folder, str(batch)),
        contestant(THEIRS, given.torch_python, folder, str(batch)),
    ]
    found = compared(pair, given)
    seconds = {who: found["seconds, quartiles"][who][1] for who in (OURS, THEIRS)}
    same = len({text for texts in found.pop("written").values() for text in texts}) == 1
    return {
        "model": name,
        "batch": batch,
        "tokens a second": {who: round(batch * TOKENS / s, 1) for who, s in seconds.items()},
        "ratio": round(seconds[THEIRS] / seconds[OURS], 3),
        "target": TARGETS["written"],
        "the same tokens": same,
        **found,
    }


def loaded(folder: Path, mesh: str, given: argparse.Namespace) -> dict[str, Any]:
    """Both, for one mesh."""
    pair = [contestant("load", sys.executable, folder, mesh), contestant("read", sys.executable, folder)]
    found = compared(pair, given)
    found.pop("written")
    seconds = {who: found["seconds, quartiles"][who][1] for who in ("load", "read")}
    size = (folder / "model.safetensors").stat().st_size
    ratio = round(seconds["load"] / seconds["read"], 3)
    return {"mesh": mesh, "bytes": size, "ratio": ratio, "most allowed": TARGETS["loaded"], **found}


def measure(given: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """All that is asked for, each result printed as it comes."""
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in given.only.split(",")}
    with TemporaryDirectory() as name:
        if "written" in results:
            for number, (model, fields) in enumerate(MODELS.items()):
                folder = Path(name) / f"model{number}"
                make(folder, fields)
                for batch in (1, 8):
                    results["written"].append(written(folder, model, batch, given))
                    print(json.dumps(results["written"][-1]), flush=True)
        if "loaded" in results:
            folder = Path(name) / "large"
            make(folder, LOADED)
            for mesh in MESHES:
                results["loaded"].append(loaded(folder, mesh, given))
                print(json.dumps(results["loaded"][-1]), flush=True)
    return results


def main() -> int:
    """Measures, prints, and keeps the result beside this file; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has torch and transformers")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds of each")
    parser.add_argument("--most", type=int, default=20, help="rounds run to find as many quiet ones")
    parser.add_argument("--only", default="written,loaded")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        kind, folder, *rest = given.serve
        match kind:
            case "load":
                load(folder, rest[0])
            case "read":
                read(folder)
            case _:
                (write_ours if kind == OURS else write_theirs)(folder, int(rest[0]))
        return 0
    if "written" in given.only:
        check_torch(given.torch_python)
    names = {given.torch_python: "torch-env/bin/python"}  # not this machine's paths
    called = shlex.join(["python", *(names.get(word, word) for word in sys.argv)])
    print(f"{called}\n{machine()}")
    results = measure(given)
    before = json.loads(RESULT.read_text())["results"] if RESULT.exists() else {}
    kept = {"command": called, "machine": machine(), "results": before | results}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    missed = [one for one in results.get("written", []) if one["ratio"] < one["target"] or not one["the same tokens"]]
    slow = [one for one in results.get("loaded", []) if one["ratio"] > one["most allowed"]]
    return int(bool(missed or slow))


if __name__ == "__main__":
    sys.exit(main())
