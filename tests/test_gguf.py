"""GGUF files of tiny models, written by the gguf package: every type of tensor, every field, and what is wrong."""

import dataclasses
import itertools

import gguf
import numpy as np
import pytest
from foreign import FAMILIES, drawn, in_order, program

import jaxgpt
from jaxgpt.cli import main
from jaxgpt.config import ModelConfig, RopeScaling
from jaxgpt.data.tokenizer import open_tokenizer
from jaxgpt.errors import UserError
from jaxgpt.inference.generate import Row
from jaxgpt.inference.text import Stream
from jaxgpt.interop import models
from jaxgpt.interop.families import GGUF
from jaxgpt.interop.tensors import as_file, rows_of, tensors_of

LLAMA = dataclasses.replace(
    FAMILIES["mistral"], window=None, width=64, heads=4, kv_heads=2, head_width=None, mlp_width=96, vocab=258
)
WORDS = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))] + ["Ġa", "<|end|>"]
TYPES = gguf.GGMLQuantizationType


def wanted(model: ModelConfig = LLAMA) -> dict[str, np.ndarray]:
    of = program(model)
    return in_order(of, drawn(of))


def file_of(path, params, model=LLAMA, kind="llama", quantized=TYPES.F32, fields=None, tokens=True):
    """A GGUF file; matrices of the given type."""
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_block_count(model.layers)
    writer.add_context_length(model.seq)
    writer.add_embedding_length(model.width)
    writer.add_feed_forward_length(model.mlp)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv)
    writer.add_key_length(model.head)
    writer.add_layer_norm_rms_eps(model.norm_epsilon)
    writer.add_rope_freq_base(model.rope_base)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(WORDS)
        writer.add_token_types([1] * (len(WORDS) - 1) + [3])
        writer.add_token_merges(["Ġ a"])
        writer.add_eos_token_id(len(WORDS) - 1)
        writer.add_chat_template("{{ messages }}")
    for add in fields or []:
        add(writer)
    for name, row in rows_of(GGUF[kind], model).items():
        stacked = name.startswith("blocks.")
        for layer, tensor in enumerate(tensors_of(name, row, model)):
            ours = params[name][layer] if stacked else params[name]
            values = np.ascontiguousarray(interleaved(name, ours, kind))
            plain = row._replace(dims=row.dims.replace("~", ""))
            values = as_file({name: values}, {name: plain}, model)
            if values.ndim < 2 or quantized == TYPES.F32:
                writer.add_tensor(tensor, values.astype(np.float32))
            else:
                writer.add_tensor(tensor, gguf.quants.quantize(values, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(name: str, ours: np.ndarray, kind: str) -> np.ndarray:
    """Queries and keys of a llama file: rotary pairs side by side."""
    if kind != "llama" or not name.startswith(("blocks.attention.query.", "blocks.attention.key.")):
        return ours
    half = ours.shape[-1] // 2
    return ours[..., [i // 2 + half * (i % 2) for i in range(2 * half)]]


def loaded(path):
    opened = models.open_model(path)
    of = program(opened.config, "fsdp=2,tensor=2")
    return opened.config, in_order(of, opened.onto(of.table, of.shardings))


def test_parameters_and_configuration_come_out_as_they_went_in(tmp_path):
    params = wanted()
    config, found = loaded(file_of(tmp_path / "m.gguf", params))
    same = {"kv_heads": LLAMA.kv, "head_width": LLAMA.head, "mlp_width": LLAMA.mlp}
    assert config == dataclasses.replace(LLAMA, **same)
    for name, array in params.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("quantized", "error"),
    [(TYPES.F16, 5e-4), (TYPES.BF16, 4e-3), (TYPES.Q8_0, 6e-3), (TYPES.Q4_0, 0.14), (TYPES.Q4_1, 0.08)],
)
def test_types_of_tensors(tmp_path, quantized, error):
    params = wanted()
    _, found = loaded(file_of(tmp_path / "m.gguf", params, quantized=quantized))
    for name, array in params.items():
        allowed = error * np.abs(array).max() if params[name].ndim > 1 + name.startswith("blocks.") else 0
        assert np.abs(found[name] - array).max() <= allowed, name
        assert np.array_equal(found[name], array) == (allowed == 0), name


def test_q6_k_is_its_definition(tmp_path):
    """256 values a block: 4 low bits, 2 high bits, a signed scale for each 16, and one fp16 for all."""
    rng = np.random.default_rng(0)
    quants, scales = rng.integers(-32, 32, (3, 256)), rng.integers(-128, 128, (3, 16)).astype(np.int8)
    shifted = (quants + 32).reshape(3, 2, 4, 32)
    low, high = shifted & 15, shifted >> 4
    ql = np.concatenate([low[:, :, :2] | (low[:, :, 2:] << 4)], -1).reshape(3, 128)
    qh = (high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)).reshape(3, 64)
    d = np.array([[0.5], [0.25], [2.0]], np.float16)
    blocks = np.concatenate([ql.astype(np.uint8), qh.astype(np.uint8), scales.view(np.uint8), d.view(np.uint8)], -1)
    model = dataclasses.replace(LLAMA, layers=1, width=256, vocab=3)
    params = wanted(model)
    params["head.weight"] = np.zeros((3, 256), np.float32)
    file = file_of(tmp_path / "plain.gguf", params, model, tokens=False)
    writer_type, original = gguf.GGUFWriter, gguf.GGUFWriter.add_tensor

    def add_tensor(self, name, tensor, *args, **named):
        if name == "output.weight":
            return original(self, name, blocks, raw_dtype=TYPES.Q6_K)
        return original(self, name, tensor, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_type, "add_tensor", add_tensor)
        file = file_of(tmp_path / "m.gguf", params, model, tokens=False)
    expected = d.astype(np.float32) * np.repeat(scales, 16, -1) * quants
    np.testing.assert_array_equal(models.open_model(file).weights.layer("head.weight", None), expected)


def test_qwens_files_are_not_permuted(tmp_path):
    model = dataclasses.replace(LLAMA, qkv_bias=True, rope_scaling=RopeScaling(factor=2.0))
    params = wanted(model)
    scaled = [
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
        lambda w: w.add_rope_scaling_factor(2.0),
    ]
    config, found = loaded(file_of(tmp_path / "m.gguf", params, model, "qwen2", fields=scaled))
    assert config.qkv_bias and config.rope_scaling == model.rope_scaling
    for name, array in params.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_a_file_becomes_a_folder_with_its_tokenizer_and_template(tmp_path, capsys):
    file = file_of(tmp_path / "m.gguf", wanted())
    run = jaxgpt.load(file, mesh="tensor=2")
    assert run.tokenizer.encode("a a<|end|>").tolist() == [WORDS.index("a"), WORDS.index("Ġa"), len(WORDS) - 1]
    assert main(["export", str(file), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert open_tokenizer(str(tmp_path / "out")).encode("a a").tolist() == run.tokenizer.encode("a a").tolist()
    again = jaxgpt.load(tmp_path / "out")
    assert again.beside == run.beside
    for name, array in in_order(run.program, run.params).items():
        np.testing.assert_array_equal(in_order(again.program, again.params)[name], array, err_msg=name)


PIECES = {
    "<unk>": (0.0, 2),
    "<s>": (0.0, 3),
    "</s>": (0.0, 3),
    **{f"<0x{byte:02X}>": (0.0, 6) for byte in range(256)},
    **{piece: (-float(rank), 1) for rank, piece in enumerate("ab abc bc aa ▁a ▁ab aab ca".split())},
    **{letter: (-100.0 - rank, 1) for rank, letter in enumerate("▁abcd")},
}


def pieced(text: str, prefix: bool) -> list[str]:
    """SentencePiece's way: again and again the best union of two neighbours, of equally good ones the first."""
    blanks = ("▁" * prefix + text).replace(" ", "▁")
    parts = [c if c in PIECES else f"<0x{byte:02X}>" for c in blanks for byte in _bytes(c)]
    while True:
        unions = [a + b for a, b in itertools.pairwise(parts)]
        known = [(PIECES[union][0], -at) for at, union in enumerate(unions) if union in PIECES]
        if not known:
            return parts
        at = -max(known)[1]
        parts[at : at + 2] = [unions[at]]


def _bytes(character: str) -> bytes:
    return b"0" if character in PIECES else character.encode()


def streamed(tokenizer, prompt: list[int], written: list[int]) -> str:
    row = Row(prompt)
    stream, pieces = Stream(tokenizer, row, [], []), []
    for token in written:
        row.written.append(token)
        pieces.append(stream.push())
        assert "\ufffd" not in pieces[-1]
    return "".join([*pieces, stream.rest()])


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_with_scores(tmp_path, prefix):
    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(list(PIECES))
        writer.add_token_scores([score for score, _ in PIECES.values()])
        writer.add_token_types([kind for _, kind in PIECES.values()])
        writer.add_add_space_prefix(prefix)
        writer.add_eos_token_id(2)

    model = dataclasses.replace(LLAMA, vocab=len(PIECES))
    file = file_of(tmp_path / "m.gguf", wanted(model), model, tokens=False, fields=[add])
    tokenizer = models.open_model(file).tokenizer
    names = list(PIECES)
    rng = np.random.default_rng(0)
    for length in range(1, 60):
        text = "".join(rng.choice(list("aaabbbccd  é€"), length))
        ids = tokenizer.encode(text).tolist()
        assert [names[i] for i in ids] == pieced(text, prefix)
        assert tokenizer.decode(ids) == text
        at = next(at for at in range(length // 2, length + 1) if "\ufffd" not in tokenizer.decode(ids[:at]))
        assert streamed(tokenizer, ids[:at], ids[at:]) == text[len(tokenizer.decode(ids[:at])) :]
    assert tokenizer.encode("</s>").tolist()[-1] == 2
    assert tokenizer.end == 2


STRING, INTS, TEXTS = gguf.GGUFValueType.STRING, gguf.GGUFValueType.INT32, gguf.GGUFValueType.ARRAY


@pytest.mark.parametrize(
    ("field", "value", "kind", "says"),
    [
        ("llama.attention.head_count", 0, INTS, "head_count 0: must be a whole number above 0"),
        ("llama.attention.head_count_kv", [2, 2], TEXTS, "head_count_kv [2, 2]: must be a whole number"),
        ("llama.attention.key_length", "x", STRING, "key_length 'x': must be a whole number"),
        ("llama.rope.freq_base", "x", STRING, "freq_base 'x': must be a number"),
        ("tokenizer.ggml.token_type", [1, 1], TEXTS, "has 258 entries and 2 kinds"),
        ("tokenizer.ggml.tokens", ["a", "b"], TEXTS, "has 2 entries and 258 kinds"),
        ("tokenizer.ggml.merges", ["q qqq"], TEXTS, "merge 'q qqq' is none of two entries"),
        ("tokenizer.ggml.merges", ["a"], TEXTS, "merge 'a ' is none of two entries"),
    ],
)
def test_fields_that_cannot_be(tmp_path, monkeypatch, field, value, kind, says):
    original = gguf.GGUFWriter.add_key_value

    def other(self, key, *rest, **named):
        original(self, key, *((value, kind) if key == field else rest), **({} if key == field else named))

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", other)
    said = refused(file_of(tmp_path / "m.gguf", wanted()))
    assert says in said and "m.gguf" in said


def test_a_text_that_is_none(tmp_path):
    whole = file_of(tmp_path / "m.gguf", wanted()).read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole.replace(b"{{ messages }}", b"\xff" * 14))
    assert "field tokenizer.chat_template is damaged" in refused(tmp_path / "m.gguf")


def refused(path) -> str:
    with pytest.raises(UserError) as caught:
        models.open_model(path)
    return str(caught.value)


def test_what_is_wrong(tmp_path):
    params = wanted()
    whole = file_of(tmp_path / "m.gguf", params).read_bytes()
    assert "none.gguf: cannot be read" in refused(tmp_path / "none.gguf")
    for content in (b"", b"GGUF", b"JUNK" + whole[4:], whole[: len(whole) // 2]):
        (tmp_path / "cut.gguf").write_bytes(content)
        assert "cut.gguf: not a whole GGUF file" in refused(tmp_path / "cut.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(GGUF, "mamba", GGUF["llama"])
        other = file_of(tmp_path / "other.gguf", params, kind="mamba")
    assert "'mamba' is not an architecture that is read; known are llama" in refused(other)
    few = file_of(tmp_path / "few.gguf", params, fields=[lambda writer: writer.add_uint32("llama.block_count", 3)])
    assert "9 missing: blk.2." in refused(few)
