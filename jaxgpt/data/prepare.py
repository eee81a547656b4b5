"""From text to tokens: units that any process can encode, and the parts they leave made into a pair of files.

    FOLDER/parts/ 00000007.bin      tokens of a unit
                  00000007.lengths  int64, tokens of each document that ends in it
                  00000007.json     counts and a CRC-32; written last: a unit that has it need not be encoded again

What units there are depends on the text and the tokenizer alone, so that any number of processes leaves the same parts.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.data import formats, megatron, sources
from jaxgpt.data.sources import Map, Span
from jaxgpt.data.tokenizer import Tokenizer, load_tokenizer

UNIT = 2**21
"""Bytes of text of a unit."""
_MOST = 10_000
"""Most units; of a larger text they grow."""
_BATCH = 2**22
"""Characters given to the tokenizer at once."""
_WINDOW = 2**16
"""Bytes in which a place to divide a text is looked for."""
_COPIED = 2**24

Told = Callable[[int, int], None]
"""Takes bytes of text done, and all of them."""


@dataclass(frozen=True)
class _Unit:
    """What one process encodes at once; as a task, with where to and as what."""

    spans: tuple[Span, ...]
    part: Path
    """Where its parts go, without the suffix."""
    tokenizer: Path
    kind: str

    @property
    def size(self) -> int:
        return sum(span.size for span in self.spans)


def encode_spans(spans: Sequence[Span], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, bool]]:
    """(tokens, whether a document ends with them) in turn, boundaries included; no more than a batch is held."""
    batch: list[str] = []
    ends: list[bool] = []
    characters = 0
    for text, end in _pieces(spans, tokenizer):
        batch.append(text)
        ends.append(end)
        characters += len(text)
        if characters >= _BATCH:
            yield from zip(tokenizer.encode_many(batch), ends, strict=True)
            batch, ends, characters = [], [], 0
    yield from zip(tokenizer.encode_many(batch), ends, strict=True)


def write(
    folder: Path,
    parts: dict[str, list[Span]],
    tokenizer: Tokenizer,
    kind: np.dtype[Any],
    run: Map = map,
    told: Told = lambda done, all: None,
) -> dict[str, tuple[int, int]]:
    """Writes FOLDER/NAME.bin and .idx of each part; returns its (tokens, documents).

    The folder holds the tokenizer already, and perhaps parts of an earlier attempt at the same, which are used. run:
    map, or Workers.map. Raises UserError where a text cannot be read any more or spelled.
    """
    (folder / "parts").mkdir(exist_ok=True)
    size = sum(span.size for spans in parts.values() for span in spans)
    least = max(UNIT, size // _MOST)
    units: dict[str, list[_Unit]] = {}
    count = done = 0
    for name, spans in parts.items():
        grouped = list(_grouped(spans, tokenizer, least))
        places = [folder / "parts" / f"{count + number:08}" for number in range(len(grouped))]
        units[name] = [_Unit(g, place, folder, kind.str) for g, place in zip(grouped, places, strict=True)]
        count += len(grouped)
    left = []
    for unit in (unit for some in units.values() for unit in some):
        if _made(unit):
            done += unit.size
        else:
            left.append(unit)
    told(done, size)
    for unit, _ in zip(left, run(_encode, left), strict=True):
        done += unit.size
        told(done, size)
    return {name: _join(folder / name, some, kind) for name, some in units.items()}


def _pieces(spans: Sequence[Span], tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """(text, whether a document ends with it): the spans' text, divided only where that changes no token."""
    for span in spans:
        rest = ""
        for text, end in sources.read(span):
            rest += text
            if end and span.bounded:
                yield rest, False
                yield tokenizer.boundary, True
                rest = ""
            elif end:
                yield rest, True
                rest = ""
            elif at := tokenizer.cut(rest):
                yield rest[:at], False
                rest = rest[at:]
        if rest:
            yield rest, False


def _grouped(spans: list[Span], tokenizer: Tokenizer, least: int) -> Iterator[tuple[Span, ...]]:
    """The spans in groups of `least` bytes of text or a little more, large ones divided."""
    group: list[Span] = []
    for span in spans:
        for each in _divided(span, tokenizer, 2 * least):
            group.append(each)
            if sum(one.size for one in group) >= least:
                yield tuple(group)
                group = []
    if group:
        yield tuple(group)


def _divided(span: Span, tokenizer: Tokenizer, most: int) -> Iterator[Span]:
    """A text file's span in parts of about `most` bytes, whose tokens are together those of the whole."""
    form = span.file.form
    while form.kind == "text" and not form.compression and span.size > most:
        stop = sources.character_start(span.file, span.start + most)
        begin = sources.character_start(span.file, max(span.start, stop - _WINDOW))
        window = b"".join(formats.blocks(span.file.path, form, begin, stop)).decode("utf-8", "replace")
        place = begin + len(window[: tokenizer.cut(window)].encode())
        if place <= begin:
            most *= 2  # no place here: a longer one is tried
            continue
        yield replace(span, stop=place, size=place - span.start, documents=0, bounded=False)
        span = replace(span, start=place, size=span.size - (place - span.start))
    yield span


# Units


def _encode(unit: _Unit) -> None:
    """Encodes a unit into its parts, in whichever process this is."""
    tokens, crc, place = 0, 0, 0
    lengths: list[int] = []
    tokenizer = _opened(unit.tokenizer)
    with _suffixed(unit.part, ".bin").open("wb") as file:
        for found, end in encode_spans(unit.spans, tokenizer):
            content = found.astype(unit.kind).tobytes()
            file.write(content)
            crc, tokens = zlib.crc32(content, crc), tokens + len(found)
            if end:
                lengths.append(tokens - place)
                place = tokens
    _suffixed(unit.part, ".lengths").write_bytes(np.array(lengths, "<i8").tobytes())
    facts = {"size": unit.size, "tokens": tokens, "documents": len(lengths), "rest": tokens - place, "crc32": crc}
    partial = _suffixed(unit.part, ".partial")
    partial.write_text(json.dumps(facts))
    partial.replace(_suffixed(unit.part, ".json"))


_tokenizers: dict[Path, Tokenizer] = {}


def _opened(folder: Path) -> Tokenizer:
    """The folder's tokenizer; the last one is kept, since a process encodes many units with it."""
    if folder not in _tokenizers:
        _tokenizers.clear()
        _tokenizers[folder] = load_tokenizer(folder)
    return _tokenizers[folder]


def _made(unit: _Unit) -> bool:
    """Whether a unit was encoded before, and its tokens are whole."""
    facts = _facts(unit)
    if facts is None or facts["size"] != unit.size:
        return False
    crc = 0
    try:
        with _suffixed(unit.part, ".bin").open("rb") as file:
            while block := file.read(_COPIED):
                crc = zlib.crc32(block, crc)
        lengths = os.path.getsize(_suffixed(unit.part, ".lengths"))
    except FileNotFoundError:
        return False
    return crc == facts["crc32"] and lengths == 8 * facts["documents"]


def _facts(unit: _Unit) -> dict[str, int] | None:
    try:
        return json.loads(_suffixed(unit.part, ".json").read_text())
    except (FileNotFoundError, ValueError):
        return None


def _join(path: Path, units: list[_Unit], kind: np.dtype[Any]) -> tuple[int, int]:
    """Makes one pair out of the units' parts."""
    data, index = megatron.pair(path)
    with data.open("wb") as file:
        for unit in units:
            with _suffixed(unit.part, ".bin").open("rb") as part:
                while block := part.read(_COPIED):
                    file.write(block)
        tokens = file.tell() // kind.itemsize
    index.unlink(missing_ok=True)  # of an attempt that was cut off here
    documents = sum(len(chunk) for chunk in _lengths(units))
    megatron.write_index(index, kind, documents, lambda: _lengths(units))
    return tokens, documents


def _lengths(units: list[_Unit]) -> Iterator[np.ndarray]:
    """Tokens of each document, a unit's at once; one that goes on in the next unit is that one's."""
    rest = 0
    for unit in units:
        facts = _facts(unit)
        assert facts is not None
        lengths = np.fromfile(_suffixed(unit.part, ".lengths"), "<i8")
        if len(lengths):
            lengths[0] += rest
            rest = 0
            yield lengths
        rest += facts["rest"]
    if rest:
        yield np.array([rest])


def _suffixed(part: Path, suffix: str) -> Path:
    return part.with_name(part.name + suffix)
