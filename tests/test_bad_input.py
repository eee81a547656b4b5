"""What a user gets wrong, through the command line and all that it calls: one clear line, and nothing harmed."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxgpt import presets
from jaxgpt.cli import main
from jaxgpt.config_file import to_json
from jaxgpt.flags import override
from jaxgpt.training import folder

TINY = "--tokenizer bytes --layers 1 --width 32 --heads 8 --kv-heads 8 --seq 16 --global-batch 8 --steps 2".split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """A folder with a text, and a token cache of its own."""
    path = tmp_path_factory.mktemp("texts")
    (path / "good.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    (path / "short.txt").write_text("too short")
    (path / "empty.txt").write_text("")
    (path / "latin.txt").write_bytes("ein schöner Satz\n".encode("latin-1") * 50)
    (path / "nothing").mkdir()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def refused(texts, cache, tmp_path, capsys):
    """train(*flags) on the good text, which must be refused; returns the one line, and looks for what it left."""

    def train(*flags: str, run: Path = tmp_path / "run") -> str:
        before = sorted(run.rglob("*"))
        assert main(["train", "--data", str(texts / "good.txt"), *TINY, "--run", str(run), *flags]) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith("jaxgpt: error: ")
        assert sorted(run.rglob("*")) == before
        return line.removeprefix("jaxgpt: error: ")

    return train


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--mesh tensr=2", "'tensr' is not an axis; did you mean tensor?"),
        ("--mesh expert=2", "no expert axis"),
        ("--mesh pipe=2", "--layers 1: must be at least the 2 parts of pipe=2 (--mesh pipe=2)"),
        ("--mesh pipe=2 --layers 4 --stages 2,1", "--stages 2,1: must sum to --layers 4, not to 3"),
        ("--mesh pipe=2 --layers 4 --stages 1,1,2", "--stages 1,1,2: must name the 2 parts of pipe=2"),
        ("--mesh pipe=2 --layers 4 --virtual-stages 2", "--virtual-stages 2: only --schedule interleaved"),
        (
            "--mesh pipe=2 --layers 4 --schedule interleaved --virtual-stages 2 --micro-batch 8",
            "--schedule interleaved: pipe=2 must divide the 1 microbatches",
        ),
        ("--mesh pipe=2,context=2 --layers 2 --context-attention ring", "--context-attention ring: not over pipe=2"),
        ("--schedule 2f2b", "--schedule 2f2b: not allowed; give one of 1f1b, gpipe, interleaved, zero-bubble"),
        ("--mesh data=-1,tensor=3", "nearest for 8 devices: "),
        ("--mesh data=16", "--mesh of 16 devices: JAX has already started with 8"),
        (
            "--mesh tensor=8 --heads 4 --kv-heads 4",
            "tensor=8 must divide --heads 4; nearest for 8 devices: data=2,tensor=4",
        ),
        ("--mesh data=8 --global-batch 12", "--global-batch 12: must be a multiple of data x fsdp = 8"),
        ("--mesh data=2 --micro-batch 3", "--micro-batch 3: must divide a device's share of --global-batch, 4"),
        ("--mesh data=2;tensor=2", "the size of data, '2;tensor=2', must be a positive whole number"),
        ("--min-lr 0.1", "--min-lr 0.1: must be at most --lr"),
        ("--lr -1", "--lr -1.0: must be above 0 and finite"),
        ("--lr nan", "--lr nan: must be above 0 and finite"),
        (
            "--mesh pipe=2 --layers 4 --schedule interleaved --virtual-stages 2 --micro-batch 3",
            "--micro-batch 3: must divide a device's share of --global-batch, 8",
        ),
        ("--layout layers=none", "--layout layers=none: 'layers' cannot be changed by hand"),
        ("--data {}/none.txt", "none.txt"),
        ("--data {}/empty.txt", "empty.txt"),
        ("--data {}/nothing", "nothing"),
        ("--data {}/short.txt", "the training part has 8 tokens, fewer than the 17 of one sample"),
        ("--data {}/latin.txt", "latin.txt"),
        ("--seq 4096", "fewer than the 4097 of one sample; take more --data, a smaller --seq"),
        ("--tokenizer none.json", "none.json"),
    ],
)
def test_refused_before_anything_is_begun(refused, texts, flags, says):
    assert says in refused(*flags.format(texts).split())


def test_meshes_are_named_where_another_mesh_is_the_cure_and_only_there(refused):
    assert "nearest for 8 devices" in refused("--mesh", "data=8", "--global-batch", "12")
    assert "nearest" not in refused("--mesh", "data=2", "--micro-batch", "3")
    assert "nearest" not in refused("--mesh", "pipe=2", "--layers", "4", "--virtual-stages", "2")


def test_a_damaged_token_store_is_named(refused, texts, cache, tmp_path):
    refused("--mesh", "data=2", "--global-batch", "7")  # the batch is looked at before the text
    assert not cache.exists()
    refused("--seq", "4096")  # stores the tokens
    (store,) = cache.rglob("train.bin")
    content = bytearray(store.read_bytes())
    content[len(content) // 2] ^= 1
    store.write_bytes(content)
    assert str(store.parent) in refused()
    assert store.read_bytes() == content


def test_a_full_disk(refused, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder, "replace", full)
    assert "No space left on device" in refused("--mesh", "data=1")


def test_a_folder_that_cannot_be(refused, texts):
    assert "Not a directory" in refused(run=texts / "good.txt" / "run")


def test_a_run_of_another_configuration_names_what_differs(refused, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").touch()
    (run / "config.json").write_text(to_json(override(presets.DEMO, {"layers": 3, "lr": 1e-2})))
    line = refused("--lr", "1e-3", run=run)
    assert "lr: 0.001, 0.01" in line
    assert "model.layers: 1, 3" in line
    assert "--run" in line


def test_somebody_elses_folder(refused, texts):
    assert "is a folder of something else" in refused(run=texts)


def test_from_a_shell_it_is_one_line_too():
    command = [sys.executable, "-m", "jaxgpt", "train", "--mesh", "tensr=2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("jaxgpt: error: --mesh tensr=2: ")
    assert done.stderr.count("\n") == 1
