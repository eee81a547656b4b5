"""jaxgpt checkpoint: what it lists, shows, finds damaged and exports, and what it refuses."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from saved import LOGICAL, files, mesh, state, values

from jaxgpt.checkpoint_verbs import damage
from jaxgpt.cli import main
from jaxgpt.interop import safetensors
from jaxgpt.interop.safetensors import SafeTensors
from jaxgpt.training import zarr
from jaxgpt.training.checkpoint import Writer

CONFIG = {"keep": 2, "keep_every": 10, "model": {"layers": 3, "rope_scaling": None}}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run's folder with three checkpoints of several files."""
    run = tmp_path_factory.mktemp("made") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr, "FILE_BYTES", 1200)
        patch.setattr(zarr, "CHUNK_BYTES", 200)
        writer = Writer(run / "checkpoints", 9)
        for step, loss in ((10, 2.5), (15, 1.25), (17, None)):
            meta = {"samples": 4 * step, "data": "abc", "config": CONFIG}
            writer.save(step, state(mesh(fsdp=2), seed=step), LOGICAL, meta, loss=loss)
        writer.close()
    return run


@pytest.fixture
def run(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture
def told(capsys):
    """jaxgpt checkpoint with these words: exit status and what it prints."""

    def tell(*words: object) -> tuple[int, str]:
        capsys.readouterr()
        status = main(["checkpoint", *map(str, words)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return tell


def test_ls_says_step_loss_samples_and_why_each_is_kept(made, told):
    status, said = told("ls", made)
    assert status == 0
    rows = {line.split()[0]: line for line in said.splitlines()[2:]}
    assert rows.keys() == {"10", "15", "17"}
    assert "2.5000" in rows["10"] and "every 10" in rows["10"] and " 40 " in rows["10"]
    assert "1.2500" in rows["15"] and "of the last 2, best" in rows["15"]
    assert "KiB" in rows["17"]
    assert told("ls", made / "checkpoints")[1] == said


def test_ls_names_what_is_damaged_or_set_aside(run, told):
    (run / "checkpoints/step-00000015/manifest.json").write_text("{}")
    (run / "checkpoints/step-00000010").rename(run / "checkpoints/step-00000010.damaged")
    _, said = told("ls", run)
    assert "15" in said and "damaged: see jaxgpt checkpoint verify" in said
    assert "step-00000010.damaged" in said and "set aside" in said


def test_inspect_says_what_one_holds(made, told):
    status, said = told("inspect", made, "--step", "best")
    assert status == 0
    assert "step-00000015" in said
    for words in ("samples", "60", "1.2500", "model.layers", "keep_every"):
        assert words in said
    lines = {line.split()[0]: line for line in said.splitlines() if line.startswith("  ")}
    assert "17 x 16" in lines["params/wte"] and "float32" in lines["params/wte"] and "1,088" in lines["params/wte"]
    assert "bfloat16" in lines["half"] and "scalar" in said
    assert "none: --eval-every does not meet this step" in told("inspect", made)[1]


def test_verify_reads_all_and_names_each_damaged_file(run, told):
    status, said = told("verify", run)
    assert status == 0
    assert said.count(": whole, ") == 3
    arrays = run / "checkpoints/step-00000015/arrays"
    bad = [arrays / "params/wte/zarr.json", *(f for f in files(arrays) if "blocks.weight/c/0/1" in str(f))]
    assert len(bad) > 3
    for file in bad:
        file.write_bytes(file.read_bytes()[:-1])
    status, said = told("verify", run)
    assert status == 1
    assert all(f"{file}: array " in said for file in bad)
    assert f"step-00000015: {len(bad)} damaged" in said
    assert said.count(": whole, ") == 2
    assert told("verify", run, "--step", "17")[0] == 0
    assert told("verify", run, "--step", "15")[0] == 1


def test_where_the_list_of_chunks_is_damaged_the_chunks_are_held_against_themselves(run):
    where = run / "checkpoints/step-00000017"
    chunk = next(f for f in files(where) if "/c/" in str(f))
    chunk.write_bytes(chunk.read_bytes()[::-1])
    (where / "CRC32C").write_bytes(b"nothing")
    assert {file for file, _ in damage(run / "checkpoints", 17)} == {where / "CRC32C", chunk}


def test_export_writes_the_parameters_bit_for_bit_piece_by_piece(made, told, tmp_path, monkeypatch):
    largest = []
    real = zarr.read

    def read(path, shape, dtype, parts, sums):
        found = real(path, shape, dtype, parts, sums)
        largest.append(max(piece.nbytes for piece in found))
        return found

    monkeypatch.setattr(zarr, "read", read)
    monkeypatch.setattr("jaxgpt.checkpoint_verbs._PIECE", 500)
    out = tmp_path / "model.safetensors"
    status, said = told("export", made, out, "--step", "10")
    assert status == 0
    assert "of step 10" in said
    assert max(largest) <= 500
    found, wanted = SafeTensors([out]), values(seed=10)
    assert found.shapes == {"wte": (17, 16), "blocks.weight": (3, 16, 24), "norm": (5,)}
    for name in found.shapes:
        assert found[name].tobytes() == wanted[f"params/{name}"][: found.shapes[name][0]].tobytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_export_names_a_damaged_chunk_and_leaves_nothing(run, told, tmp_path):
    chunk = run / "checkpoints/step-00000017/arrays/params/blocks.weight/c/0/1/1"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    status, said = told("export", run, tmp_path / "out.safetensors")
    assert status == 2
    assert str(chunk) in said and "params/blocks.weight" in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_at_export_is_one_line_and_leaves_nothing(made, told, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "_bytes", full)
    status, said = told("export", made, tmp_path / "out.safetensors")
    assert (status, said.count("\n")) == (2, 1)
    assert "No space left on device" in said and "out.safetensors" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ls {tmp}", "{tmp}: holds no checkpoint"),
        ("ls {tmp}/none", "{tmp}/none: holds no checkpoint"),
        ("inspect {made} --step 11", "has no checkpoint of that step; it has 10, 15, 17"),
        ("inspect {made} --step soon", "--step soon: must be a step, last or best"),
        ("verify {made} --step 11", "has no checkpoint of that step"),
        ("export {made} {tmp}/there.safetensors", "OUT {tmp}/there.safetensors: is there already"),
        ("export {made} {tmp}/out.npz", "OUT {tmp}/out.npz: must end in .safetensors"),
        ("export {made} {tmp}/none/out.safetensors", "must be in a folder that is there"),
        ("export {made} {tmp}/cut.safetensors", "OUT {tmp}/cut.safetensors.partial: is there already"),
        ("list {made}", "checkpoint list: no such verb; did you mean ls? known are ls, inspect, verify, export"),
        ("ls", "RUN"),
    ],
)
def test_what_is_refused_is_refused_in_one_line_and_nothing_is_harmed(words, says, made, told, tmp_path):
    for name in ("there.safetensors", "cut.safetensors.partial"):
        (tmp_path / name).write_text("mine")
    status, said = told(*words.format(made=made, tmp=tmp_path).split())
    assert (status, said.count("\n")) == (2, 1)
    assert says.format(tmp=tmp_path) in said
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == {
        "there.safetensors": "mine",
        "cut.safetensors.partial": "mine",
    }


def test_neither_jax_nor_a_model_is_needed(made):
    code = "import sys; sys.modules['jax'] = None; from jaxgpt.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "checkpoint", "verify", str(made)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": whole, ") == 3


def test_help_names_the_verbs(told):
    assert all(f"\n  {verb} " in told("--help")[1] for verb in ("ls", "inspect", "verify", "export"))
    assert told()[0] == 0
