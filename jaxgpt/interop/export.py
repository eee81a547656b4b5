"""A model of ours as a Hugging Face folder: config.json, safetensors, tokenizer files, generation_config.json."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxgpt.config import ModelConfig
from jaxgpt.data.tokenizer import BytesTokenizer, CharsTokenizer, LibraryTokenizer, Tokenizer
from jaxgpt.errors import UserError, require
from jaxgpt.interop import beside as around
from jaxgpt.interop import huggingface, safetensors
from jaxgpt.interop.tensors import LAYERS, Row, as_file, rows_of, shape_in_file, sizes_of
from jaxgpt.model.parameters import parameters

LARGEST_FILE = 5 * 10**9
"""Bytes, as transformers has it."""
_NAMES = {"fp32": "float32", "bf16": "bfloat16"}


def refuse_taken(out: Path) -> None:
    """Raises UserError where something is at `out` already. Asked before a model is opened, too: that takes a while."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there already; give a new or empty folder")
    if out.resolve() == Path.cwd():
        raise UserError(f"{out}: is the folder that this runs in, which cannot be replaced; give a new folder")


def export(
    out: Path,
    config: ModelConfig,
    params: Mapping[str, jax.Array],
    in_order: Callable[[str, np.ndarray], np.ndarray],
    tokenizer: Tokenizer | None,
    beside: around.Beside,
    dtype: str = "fp32",
    largest_file: int = LARGEST_FILE,
) -> None:
    """Writes the folder, whole or not at all.

    in_order: a parameter with its layers in their order (Program.in_order). dtype: fp32, which loses nothing, or bf16.
    Raises UserError where no architecture of transformers has the model, or where something is at `out` already.
    """
    require(dtype in _NAMES, "--dtype", dtype, f"must be one of {', '.join(_NAMES)}")
    fields = huggingface.to_config(config, _NAMES[dtype])
    refuse_taken(out)
    beginning, end = _ends(tokenizer, beside)
    fields |= {"bos_token_id": beginning, "eos_token_id": end}
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:  # a folder of that name is somebody's: it is not written to, nor removed
        raise UserError(f"{out}: cannot be written ({error.strerror or error})") from None
    try:
        (partial / huggingface.CONFIG).write_bytes(around.as_json(fields))
        _write_tokenizer(partial, config, tokenizer, beside)
        (partial / around.GENERATION).write_bytes(
            beside.get(around.GENERATION, around.as_json({"bos_token_id": beginning, "eos_token_id": end}))
        )
        groups = _groups(config)
        shapes = {name: shape for group in groups.values() for name, shape in _shapes(group, config).items()}
        tensors = _tensors(groups, config, params, in_order)
        safetensors.write(partial, shapes, tensors, safetensors.DTYPES[dtype], largest_file)
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _ends(tokenizer: Tokenizer | None, beside: around.Beside) -> tuple[int | None, int | list[int] | None]:
    """Ids of the beginning and the end of a text."""
    given = json.loads(beside.get(around.GENERATION, b"{}"))
    return given.get("bos_token_id"), given.get("eos_token_id", None if tokenizer is None else tokenizer.end)


def _groups(config: ModelConfig) -> dict[str, dict[str, Row]]:
    """The rows of the family's table by the file's name: several where the file stacks parameters in one tensor."""
    groups: dict[str, dict[str, Row]] = {}
    for name, row in rows_of(huggingface.family_of(config), config).items():
        groups.setdefault(row.name, {})[name] = row
    return groups


def _layers(group: Mapping[str, Row], config: ModelConfig) -> list[int | None]:
    stacked = parameters(config)[next(iter(group))].dims[0] == LAYERS
    return [*range(config.layers)] if stacked else [None]


def _shapes(group: Mapping[str, Row], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    row = next(iter(group.values()))
    shape = shape_in_file(row.dims, sizes_of(config))
    return {row.name.format(layer): shape for layer in _layers(group, config)}


def _tensors(
    groups: Mapping[str, Mapping[str, Row]],
    config: ModelConfig,
    params: Mapping[str, jax.Array],
    in_order: Callable[[str, np.ndarray], np.ndarray],
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and values of each tensor of the files. Held on the host are the parameters of one name at a time."""
    for template, group in groups.items():
        # without the padding of the vocabulary, and of no other dimension
        whole = {n: in_order(n, np.asarray(params[n]))[: parameters(config)[n].logical[0]] for n in group}
        for layer in _layers(group, config):
            one = whole if layer is None else {name: array[layer] for name, array in whole.items()}
            yield template.format(layer), as_file(one, group, config)


def _write_tokenizer(folder: Path, config: ModelConfig, tokenizer: Tokenizer | None, beside: around.Beside) -> None:
    for name, content in beside.items():
        (folder / name).write_bytes(content)
    if tokenizer is None:
        return
    library = as_library(tokenizer)
    library.save(folder)
    if around.TOKENIZER not in beside:
        fields: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.seq,
            "clean_up_tokenization_spaces": False,
        }
        if library.end is not None:
            fields["eos_token"] = library.boundary
        (folder / around.TOKENIZER).write_bytes(around.as_json(fields))


def as_library(tokenizer: Tokenizer) -> LibraryTokenizer:
    """The same tokens by the tokenizers library, which other tools read: bytes, and characters, as a BPE that merges
    nothing."""
    if isinstance(tokenizer, LibraryTokenizer):
        return tokenizer
    if isinstance(tokenizer, BytesTokenizer):
        vocabulary = {_spelling(byte): byte for byte in range(256)}
        library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        return LibraryTokenizer(library)
    if isinstance(tokenizer, CharsTokenizer):
        vocabulary = {character: number for number, character in enumerate(tokenizer.characters)}
        library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        library.decoder = decoders.Fuse()
        return LibraryTokenizer(library)
    raise TypeError(f"a tokenizer of kind {type(tokenizer).__name__}")


def _spelling(byte: int) -> str:
    """The character that stands for a byte in a byte-level vocabulary (GPT-2's rule): itself where it can be seen, else
    one beyond 255, in order."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in seen:
        return chr(byte)
    return chr(256 + sum(1 for other in range(byte) if other not in seen))
