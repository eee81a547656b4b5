"""What lies beside a model's tokenizer in Hugging Face's folders, and is carried along: chat template, special tokens,
how to generate."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.interop.huggingface import read_json

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer_config.json"
FILES = (
    TOKENIZER,
    GENERATION,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
Beside = dict[str, bytes]
"""Content of those of FILES that there are."""


def read(folder: Path) -> Beside:
    """Those of a folder. Raises UserError where how to generate is damaged, which an export would pass on."""
    found = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    if GENERATION in found:
        read_json(folder / GENERATION)
    return found


def with_ends(beside: Mapping[str, bytes], fields: Mapping[str, Any]) -> Beside:
    """With a generation_config.json, made from a configuration's token ids where there is none."""
    ids = {name: fields[name] for name in ("bos_token_id", "eos_token_id") if fields.get(name) is not None}
    return {**({GENERATION: as_json(ids)} if ids else {}), **beside}


def from_gguf(fields: Mapping[str, Any]) -> Beside:
    """The same files from what a GGUF file says."""
    named = {name: fields[name] for name in ("bos_token", "eos_token") if name in fields}
    files = {TOKENIZER: as_json({"tokenizer_class": "PreTrainedTokenizerFast", **named})} if named else {}
    if "chat_template" in fields:
        files["chat_template.jinja"] = str(fields["chat_template"]).encode()
    return with_ends(files, fields)


def ends(beside: Mapping[str, bytes], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end a text: those that generation_config.json names, else the tokenizer's own."""
    try:
        found = json.loads(beside.get(GENERATION, b"{}"))["eos_token_id"]
    except KeyError:
        found = None if tokenizer is None else tokenizer.end
    listed = found if isinstance(found, list) else [found]
    return tuple(one for one in listed if isinstance(one, int))


def as_json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()
