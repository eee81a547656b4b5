"""Models to and from Hugging Face's folders: nothing lost, on any mesh, and one line for what is wrong."""

import dataclasses
import json
import os
import struct
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from foreign import FAMILIES, drawn, in_order, program
from quickly import unoptimized

import jaxgpt
from jaxgpt.cli import main
from jaxgpt.config import ModelConfig
from jaxgpt.data.tokenizer import BytesTokenizer, CharsTokenizer, open_tokenizer, train_bpe
from jaxgpt.errors import UserError
from jaxgpt.interop import beside, huggingface, models, safetensors
from jaxgpt.interop.export import as_library, export
from jaxgpt.interop.families import HUGGING_FACE

MESHES = ["data=1", "fsdp=2,tensor=4", "pipe=2,tensor=2", "context=2,data=2"]


def exported(folder, model: ModelConfig, tokenizer=None, files=None, **how):
    """A folder of a random model, and its parameters."""
    of = program(model)
    params = drawn(of)
    export(folder, model, params, of.in_order, tokenizer, files or {}, **how)
    return in_order(of, params)


@pytest.fixture(autouse=True)
def cheaply():
    with unoptimized():
        yield


@pytest.fixture
def folder(tmp_path):
    """A small LLaMA with a tokenizer."""
    exported(tmp_path / "model", dataclasses.replace(FAMILIES["llama"], vocab=256), BytesTokenizer())
    return tmp_path / "model"


def refused(function, *args) -> str:
    with pytest.raises(UserError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Both ways


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_comes_back(family, tmp_path):
    model = FAMILIES[family]
    fields = huggingface.to_config(model, "float32")
    assert (fields["model_type"], fields["architectures"]) == (family, [HUGGING_FACE[family].architecture])
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = huggingface.read_config(tmp_path / "config.json")[1]
    same = {"mlp_width": model.mlp, "kv_heads": model.kv, "head_width": model.head}
    assert dataclasses.replace(found, **same) == dataclasses.replace(model, **same)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_come_back_bit_for_bit(family, tmp_path):
    wanted = exported(tmp_path / "model", FAMILIES[family])
    opened = models.open_model(tmp_path / "model")
    for mesh in MESHES:
        of = program(opened.config, mesh)
        placed = opened.onto(of.table, of.shardings)
        for name, array in in_order(of, placed).items():
            np.testing.assert_array_equal(array, wanted[name], err_msg=f"{name} on {mesh}")
        assert {n: a.sharding for n, a in placed.items()} == of.shardings
        for name, array in placed.items():  # padding is zero
            whole = of.in_order(name, np.asarray(array))
            assert not whole[wanted[name].shape[0] :].any()


def test_uneven_stages_leave_their_empty_rows_zero(tmp_path):
    model = dataclasses.replace(FAMILIES["gpt2"], layers=3)
    wanted = exported(tmp_path / "model", model)
    of = program(model, "pipe=2")
    placed = models.open_model(tmp_path / "model").onto(of.table, of.shardings)
    name = "blocks.mlp.up.weight"
    np.testing.assert_array_equal(in_order(of, placed)[name], wanted[name])
    (empty,) = [row for row, layer in enumerate(of.table[name].rows) if layer < 0]
    assert not np.asarray(placed[name])[empty].any()


def test_a_large_model_is_several_files(tmp_path):
    wanted = exported(tmp_path / "model", FAMILIES["qwen3"], largest_file=20_000)
    index = json.loads((tmp_path / "model" / safetensors.INDEX).read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3
    assert {path.name for path in (tmp_path / "model").glob("*.safetensors")} == files
    assert index["metadata"]["total_size"] == sum(4 * array.size for array in wanted.values())
    opened = models.open_model(tmp_path / "model")
    of = program(opened.config)
    for name, array in in_order(of, opened.onto(of.table, of.shardings)).items():
        np.testing.assert_array_equal(array, wanted[name])


def test_bf16_is_rounded_and_read(tmp_path):
    wanted = exported(tmp_path / "model", FAMILIES["gpt_neox"], dtype="bf16")
    opened = models.open_model(tmp_path / "model")
    of = program(opened.config)
    for name, array in in_order(of, opened.onto(of.table, of.shardings)).items():
        np.testing.assert_array_equal(array, wanted[name].astype(ml_dtypes.bfloat16).astype(np.float32))


def test_a_device_is_sent_its_own_part_and_no_more_is_read_at_once(tmp_path, monkeypatch):
    exported(tmp_path / "model", FAMILIES["llama"])
    opened = models.open_model(tmp_path / "model")
    of = program(opened.config, "fsdp=2,tensor=4")
    read, sizes = opened.weights.read, {}

    def recorded(name, parameter, index):
        part = read(name, parameter, index)
        sizes.setdefault(name, []).append(part.size)
        return part

    monkeypatch.setattr(opened.weights, "read", recorded)
    placed = opened.onto(of.table, of.shardings)
    for name, array in placed.items():
        shard = array.addressable_shards[0].data.size
        assert sizes[name] == [shard] * (array.size // shard)  # each different part once, copies not again


def test_a_file_is_mapped_and_not_read_as_a_whole(tmp_path):
    exported(tmp_path / "model", FAMILIES["llama"])
    tensors = safetensors.SafeTensors(safetensors.files_in(tmp_path / "model"))
    view = tensors["model.layers.1.mlp.up_proj.weight"]
    while not isinstance(view, np.memmap):
        view = view.base
    assert models.open_model(tmp_path / "model").weights.layer("blocks.attention.out.weight", 1).base is not None


def test_gpt2_files_of_the_bare_model_are_read(tmp_path):
    """OpenAI's own file has no "transformer." before its names, and masks beside its parameters."""
    wanted = exported(tmp_path / "model", FAMILIES["gpt2"])
    tensors = safetensors.SafeTensors(safetensors.files_in(tmp_path / "model"))
    bare = {name.removeprefix("transformer."): tensors[name].copy() for name in tensors.shapes}
    bare |= {"h.0.attn.bias": np.ones((1, 1, 16, 16), np.float32), "lm_head.weight": bare["wte.weight"]}
    shapes = {name: array.shape for name, array in bare.items()}
    safetensors.write(tmp_path / "model", shapes, iter(bare.items()), "F32", 10**9)
    opened = models.open_model(tmp_path / "model")
    of = program(opened.config)
    np.testing.assert_array_equal(
        in_order(of, opened.onto(of.table, of.shardings))["blocks.attention.key.weight"],
        wanted["blocks.attention.key.weight"],
    )


# Tokenizers


def test_every_tokenizer_is_exported_with_the_same_tokens():
    text = "def f(x):\n    return 'ä€'\n" * 3
    for tokenizer in (BytesTokenizer(), CharsTokenizer(text), train_bpe(iter([text]), 260)):
        library = as_library(tokenizer)
        np.testing.assert_array_equal(library.encode(text), tokenizer.encode(text))
        assert library.decode(library.encode(text)) == text
        assert library.size == tokenizer.size


def test_what_lies_beside_a_tokenizer_is_carried_along(tmp_path):
    files = {
        "chat_template.jinja": b"{{ messages }}",
        "tokenizer_config.json": b'{"eos_token": "x"}',
        "generation_config.json": b'{"eos_token_id": [3, 4]}',
    }
    exported(tmp_path / "a", dataclasses.replace(FAMILIES["gpt2"], vocab=256), BytesTokenizer(), files)
    run = jaxgpt.load(tmp_path / "a")
    run.export(tmp_path / "b")
    for name, content in files.items():
        assert (tmp_path / "b" / name).read_bytes() == content
    assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == [3, 4]
    assert beside.ends(run.beside, run.tokenizer) == (3, 4)
    text = "any text"
    np.testing.assert_array_equal(open_tokenizer(str(tmp_path / "b")).encode(text), run.tokenizer.encode(text))


# Verbs


def test_a_folder_is_sampled_evaluated_and_exported(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some words, and some more " * 20)
    sample = ["sample", str(folder), "--prompt", "ab", "--tokens", "5", "--temperature", "0"]
    assert main(sample) == 0
    written = capsys.readouterr().out
    assert written.startswith("ab")
    assert main([*sample, "--mesh", "tensor=2", "--top-k", "5", "--top-p", "0.9"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == written.splitlines()[-1]
    assert main(["eval", str(folder), "--data", str(tmp_path / "text.txt"), "--mesh", "data=2"]) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_sample_is_piped_to_what_reads_its_beginning(folder):
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    sample = [sys.executable, "-m", "jaxgpt", "sample", str(folder), "--prompt", b"a\xff", "--tokens", "30"]
    with subprocess.Popen(sample, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=strict) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read1(1) == b"a"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_training_goes_on_from_a_folder(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "text.txt").write_text("some words, and some more " * 200)
    run = tmp_path / "run"
    flags = "--steps 1 --warmup 0 --lr 1e-30 --min-lr 0 --weight-decay 0 --global-batch 8 --eval-tokens 64".split()
    begin = ["train", "--init-from", str(folder), "--data", str(tmp_path / "text.txt"), "--run", str(run)]
    assert main([*begin, *flags, "--mesh", "fsdp=2,tensor=2"]) == 0
    assert main(["export", str(run), str(tmp_path / "out")]) == 0  # a step of no length: the same weights
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    (folder / "model.safetensors").unlink()  # what has begun needs it no more
    assert main(["train", "--run", str(run), "--steps", "2", "--mesh", "data=1"]) == 0
    assert main(["sample", str(run), "--prompt", "so", "--tokens", "3"]) == 0


# Bad input


def test_no_model(tmp_path):
    assert "it has no config.json" in refused(models.open_model, tmp_path)
    assert "it has no config.json" in refused(jaxgpt.load, tmp_path)
    assert "it has no config.json" in refused(jaxgpt.load, tmp_path / "none")


def test_an_architecture_that_is_not_known_names_those_that_are(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    said = refused(jaxgpt.load, tmp_path)
    assert "'bert'" in said and all(family in said for family in FAMILIES)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("num_hidden_layers", "many", "num_hidden_layers 'many': must be of type int"),
        ("model_type", ["llama"], "model_type ['llama'] is not an architecture that is read"),
        ("num_hidden_layers", True, "num_hidden_layers True: must be of type int"),
        ("hidden_act", "mish", "hidden_act 'mish': not an activation that is known; known are gelu"),
        ("rope_scaling", {"rope_type": "yarn"}, "rope_type 'yarn': not a scaling that is known"),
        ("num_attention_heads", 0, "--heads 0: must be at least 1"),
        ("num_key_value_heads", 3, "--kv-heads 3: must divide --heads 8"),
        ("hidden_size", 40, "of another shape: model.embed_tokens.weight is [256, 32], not [256, 40]"),
        ("num_hidden_layers", 3, "9 missing: "),
        ("num_hidden_layers", 1, "9 unexpected: "),
        ("mlp_bias", True, "6 missing: "),
    ],
)
def test_a_configuration_that_cannot_be(folder, field, value, says):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {field: value}))
    said = refused(jaxgpt.load, folder)
    assert says in said and str(folder) in said


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_configuration_that_is_damaged(folder, content):
    (folder / "config.json").write_bytes(content)
    assert "config.json: not " in refused(jaxgpt.load, folder)


def test_pickles_are_never_opened(folder):
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in refused(jaxgpt.load, folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    said = refused(jaxgpt.load, folder)
    assert "has pytorch_model.bin and no safetensors file, and pickles are never opened" in said


def test_megatrons_checkpoints_are_refused_with_their_converter(folder):
    (folder / "model.safetensors").unlink()
    (folder / "__0_0.distcp").touch()
    assert "torch_dist" in refused(jaxgpt.load, folder)


def test_damaged_safetensors(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    for content in (
        b"",
        whole[:4],
        whole[:200],
        whole[:-1],
        struct.pack("<Q", 2**60) + whole[8:],
        whole[:8] + b"x" * header + whole[8 + header :],
        whole[:8] + b"[]".ljust(header) + whole[8 + header :],
        whole[:8] + (b'{"a": ' + b"[" * 1000 * (header // 1010)).ljust(header) + whole[8 + header :],
    ):
        file.write_bytes(content)
        assert f"{file}: not a whole safetensors file" in refused(jaxgpt.load, folder)


def test_an_index_that_points_elsewhere(folder):
    (folder / safetensors.INDEX).write_text('{"weight_map": {"a": "../other.safetensors"}}')
    assert "outside" in refused(jaxgpt.load, folder)
    (folder / safetensors.INDEX).write_text('{"weight_map": {"a": "absent.safetensors"}}')
    assert "absent.safetensors: cannot be read" in refused(jaxgpt.load, folder)
    (folder / safetensors.INDEX).write_text('{"weight_map": 3}')
    assert "not an index" in refused(jaxgpt.load, folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_how_to_generate_is_damaged(folder, content):
    (folder / "generation_config.json").write_bytes(content)
    assert "generation_config.json: not " in refused(jaxgpt.load, folder)


def test_an_export_is_of_a_type_and_to_a_new_folder(folder, tmp_path, monkeypatch):
    run = jaxgpt.load(folder)
    assert "--dtype fp16: must be one of fp32, bf16" in refused(run.export, tmp_path / "out", "fp16")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert ".: is the folder that this runs in" in refused(run.export, ".")


def test_a_tokenizer_that_does_not_match(folder):
    train_bpe(iter(["abc def"]), 258).save(folder)
    said = refused(jaxgpt.load, folder)
    assert "its tokenizer has" in said and "and its model 256" in said


def test_from_the_command_line(folder, tmp_path, capsys):
    for args, says in (
        (["sample", str(folder), "--prompt", "x" * 17], "--prompt of 17 tokens: is longer than the context of 16"),
        (["sample", str(folder), "--mesh", "tensor=3"], "tensor=3 must divide --heads 8"),
        (["sample", str(folder), "--top-p", "2"], "--top-p 2.0: must be above 0 and at most 1"),
        (["eval", str(folder)], "--data: is not given"),
        (["export", str(folder), str(folder)], "is there already; give a new or empty folder"),
        (["train", "--init-from", str(tmp_path)], "it has no config.json"),
        (["train", "--init-from", str(folder), "--layers", "3", "--run", str(tmp_path / "r")], "9 missing"),
        (["train", "--init-from", str(tmp_path / "none.gguf")], "none.gguf: cannot be read"),
    ):
        assert main(args) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("jaxgpt: error: ") and says in line, line


def test_a_model_that_no_architecture_has(tmp_path):
    model = dataclasses.replace(FAMILIES["llama"], parallel_residual=True)
    assert "known are gpt2, gpt_neox" in refused(exported, tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_tokenizer_reads_tokens_and_writes_no_text(tmp_path):
    exported(tmp_path / "model", FAMILIES["llama"])
    run = jaxgpt.load(tmp_path / "model")
    assert run(jax.numpy.zeros((1, 3), int)).shape == (1, 3, 127)
    assert "has no tokenizer" in refused(run.generate, "a")
