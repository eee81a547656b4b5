"""The tokenizers that GGUF files carry, as the tokenizers library's: byte-level BPE by its merges, and SentencePiece's
BPE ("llama"), which has scores in the place of merges."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from jaxgpt.data.tokenizer import LibraryTokenizer
from jaxgpt.errors import UserError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Kinds of entries. Those of the last two a text never spells piece by piece; 6 is a byte, "<0x0A>"."""
_BLANK = "\u2581"
"""What stands for a blank in a piece."""


def tokenizer(path: Path, get: Callable[..., Any]) -> LibraryTokenizer | None:
    """The tokenizer of a file; None where it has none. get: its fields by name, as GGUFFile.get.

    Raises UserError for one of another kind, or without scores.
    """
    kind, words = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "default")
    if kind is None:
        return None
    known = kind == "llama" or (kind == "gpt2" and words in _WORDS)
    if not known:
        raise UserError(
            f"{path}: tokenizer {kind} ({words}) is not read; known are llama, and gpt2 with {', '.join(_WORDS)}"
        )
    entries: list[str] = get("tokenizer.ggml.tokens", [])
    kinds: list[int] = get("tokenizer.ggml.token_type", [_NORMAL] * len(entries))
    if len(kinds) != len(entries):
        raise UserError(f"{path}: tokenizer {kind} has {len(entries)} entries and {len(kinds)} kinds; fetch it again")
    library = _pieces(path, get, entries, kinds) if kind == "llama" else _byte_pairs(path, get, entries, words)
    whole = list(zip(entries, kinds, strict=True))
    library.add_special_tokens([text for text, each in whole if each == _CONTROL])
    library.add_tokens([text for text, each in whole if each == _USER_DEFINED])
    return LibraryTokenizer(library)


def _byte_pairs(path: Path, get: Callable[..., Any], entries: list[str], words: str) -> tokenizers.Tokenizer:
    merges = [merge.partition(" ")[::2] for merge in get("tokenizer.ggml.merges", [])]
    vocabulary = {text: number for number, text in enumerate(entries)}
    for pair in merges:
        if not vocabulary.keys() >= {*pair, "".join(pair)}:
            raise UserError(f"{path}: tokenizer merge {' '.join(pair)!r} is none of two entries; fetch it again")
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    library.pre_tokenizer = _WORDS[words]()
    library.decoder = decoders.ByteLevel()
    if words == "qwen2":
        library.normalizer = normalizers.NFC()
    return library


def _pieces(path: Path, get: Callable[..., Any], entries: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    """Of neighbouring pieces those whose union has the highest score are joined first (arXiv 1808.06226); a character
    that is no piece becomes its bytes."""
    scores: list[float] | None = get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(entries):
        raise UserError(f"{path}: tokenizer llama has no score for each of its {len(entries)} entries; fetch it again")
    unknown = next((text for text, kind in zip(entries, kinds, strict=True) if kind == _UNKNOWN), None)
    library = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: number for number, text in enumerate(entries)},
            merges=_merges(entries, kinds, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    first = [normalizers.Prepend(_BLANK)] if get("tokenizer.ggml.add_space_prefix", True) else []
    library.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _BLANK)])
    dropped = [decoders.Strip(" ", 1, 0)] if first else []
    library.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *dropped]
    )
    return library


def _merges(entries: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of pieces whose union is one, the highest score first."""
    known = {text for text, kind in zip(entries, kinds, strict=True) if kind == _NORMAL}
    ordered = sorted((text for text in known if len(text) > 1), key=_ranks(entries, scores).__getitem__)
    halves = ((text[:at], text[at:]) for text in ordered for at in range(1, len(text)))
    return [(left, right) for left, right in halves if left in known and right in known]


def _ranks(entries: Sequence[str], scores: Sequence[float]) -> dict[str, tuple[float, int]]:
    return {text: (-score, number) for number, (text, score) in enumerate(zip(entries, scores, strict=True))}


def _byte_level(use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    """Words as LLaMA 3 and Qwen 2 divide a text; digits: how many digits make a number."""
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    parts = [pre_tokenizers.Split(Regex(words), behavior="isolated"), _byte_level(False)]
    return pre_tokenizers.Sequence(parts)


_WORDS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _byte_level,
    "gpt-2": _byte_level,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
    "llama-bpe": lambda: _split("{1,3}"),
    "qwen2": lambda: _split(""),
}
"""How a text is divided into words before merging, by GGUF's tokenizer.ggml.pre."""
