"""Data as fast as it can be: tokens loaded against numpy reading the file, tokens prepared against the tokenizer alone.

    python experiments/bench_data.py [--megabytes 32] [--rounds 7]

Loaded: batches of 256 samples of 2048 tokens in the order of training, against numpy.fromfile reading the same file of
2-byte tokens from its start to its end in blocks of as many, as the int32 that a step takes; and without that
conversion. All from the page cache, in turn, by processor time, since each is one thread and a machine may be shared.
Prepared: `jaxgpt data prepare` from JSONL (reading it twice, checksums, the files written and settled on the disk) with
a byte-level BPE of 8192 entries, against the tokenizers library encoding the same texts, held in memory, on all cores;
both as processes of their own, whose imports do not count, in turn. An index: one position of an order of 10^11
samples.

The text is the Python standard library's source, repeated. Needs no GPU; takes about three minutes on two cores.
"""

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers

from jaxgpt.data import open_mixture, sample_indices, sources
from jaxgpt.data.tokenizer import LibraryTokenizer, train_bpe
from jaxgpt.data.workers import cores

RESULT = Path(__file__).parent / "results" / "bench_data.json"
SEQ, BATCH = 2048, 256
VOCAB = 8192
TARGETS = {"loaded": 0.5, "prepared": 0.7, "index": 1.0}
"""Least ratios, and most milliseconds."""
_ALONE = """
import json, sys, time, tokenizers
library = tokenizers.Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
began = time.perf_counter()
for at in range(0, len(texts), 1000):
    library.encode_batch_fast(texts[at : at + 1000], add_special_tokens=False)
print(time.perf_counter() - began)
"""
_OURS = """
import sys, time
from jaxgpt.cli import main
import jaxgpt.data_verbs
began = time.perf_counter()
assert main(["data", "prepare", "--data", sys.argv[2], "--tokenizer", sys.argv[1], "--out", sys.argv[3]]) == 0
print(time.perf_counter() - began)
"""


def loading(folder: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of batches, and of numpy alone."""
    letters = np.random.default_rng(0).integers(97, 123, megabytes * 2**20 // 2).astype(np.uint8)
    (folder / "loaded.txt").write_bytes(letters.tobytes())
    mixture = open_mixture(str(folder / "loaded.txt"), "bytes", 256, 0.01, folder / "cache")
    stored = Path(mixture.manifest["folder"]) / "train.bin"
    batches = mixture.train_tokens // (SEQ * BATCH)

    def ours() -> int:
        for number in range(batches):
            mixture.batch(SEQ, 0, np.arange(number * BATCH, (number + 1) * BATCH))
        return batches * BATCH * SEQ

    def alone(convert: bool) -> int:
        read = 0
        with stored.open("rb") as file:
            while len(block := np.fromfile(file, "<u2", SEQ * BATCH)):
                read += len(block.astype(np.int32) if convert else block)
        return read

    contestants = {"jaxgpt": ours, "numpy alone": partial(alone, True), "without conversion": partial(alone, False)}
    return compared({name: timed(work) for name, work in contestants.items()}, rounds, TARGETS["loaded"])


def preparing(folder: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    """Bytes a second of text made into tokens, and of the tokenizer alone."""
    spans = sources.whole(sources.find_documents("stdlib"))
    texts = ["".join(sources.texts([span])) for span in spans]
    tokenizer: LibraryTokenizer = train_bpe(iter(texts), VOCAB)
    tokenizer.save(folder)
    size = 0
    with (folder / "texts.jsonl").open("w", encoding="utf-8") as file:
        while size < megabytes * 2**20:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
                size += len(text.encode())
    number = iter(range(10**6))

    def process(code: str) -> Callable[[], tuple[int, float]]:
        def run() -> tuple[int, float]:
            words = [str(folder / "tokenizer.json"), str(folder / "texts.jsonl"), str(folder / f"out{next(number)}")]
            done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
            return size, float(done.stdout.splitlines()[-1])

        return run

    found = compared({"jaxgpt": process(_OURS), "tokenizer alone": process(_ALONE)}, rounds, TARGETS["prepared"])
    return found | {"megabytes": round(size / 2**20, 1), "vocabulary": VOCAB}


def index(rounds: int) -> dict[str, Any]:
    """Milliseconds of one position of an order of 10^11 samples."""
    took = []
    for number in range(100 * rounds):
        began = time.perf_counter()
        sample_indices(0, 10**11 + number * 12_345, 1, 10**11)
        took.append(1e3 * (time.perf_counter() - began))
    return {"milliseconds": round(statistics.median(took), 4), "most allowed": TARGETS["index"]}


def timed(work: Callable[[], int]) -> Callable[[], tuple[int, float]]:
    """The work and its seconds of processor time."""

    def run() -> tuple[int, float]:
        began = time.process_time()
        done = work()
        return done, time.process_time() - began

    return run


def compared(contestants: dict[str, Callable[[], tuple[int, float]]], rounds: int, target: float) -> dict[str, Any]:
    """Median rates, run in turn; the first round is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            done, seconds = run()
            if number:
                rates[name].append(done / seconds)
    medians = {name: statistics.median(some) for name, some in rates.items()}
    ours, other, *_ = medians.values()
    return {"a second": {n: round(m) for n, m in medians.items()}, "ratio": round(ours / other, 3), "target": target}


def main() -> int:
    """Measures, prints, and keeps the result beside this file; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=32, help="of text to prepare; four times as many to load")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        found = {
            "loaded, tokens": loading(folder, 4 * given.megabytes, given.rounds),
            "prepared, bytes of text": preparing(folder, given.megabytes, given.rounds),
            "an index of 10^11 samples": index(given.rounds),
        }
    for what, result in found.items():
        print(what, json.dumps(result))
    kept = {
        "command": shlex.join(["python", *sys.argv]),
        "cores": cores(),
        "versions": {n: m.__version__ for n, m in (("numpy", np), ("tokenizers", tokenizers))}
        | {"python": platform.python_version()},
        "results": found,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    missed = [what for what, result in found.items() if result.get("ratio", 9) < result.get("target", 0)]
    slow = found["an index of 10^11 samples"]["milliseconds"] > TARGETS["index"]
    return int(bool(missed) or slow)


if __name__ == "__main__":
    sys.exit(main())
