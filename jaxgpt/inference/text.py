"""Generation in terms of text: prompts encoded, tokens decoded as they come, ended by a stop string or an end token."""

from collections.abc import Iterator, Sequence

from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.inference.decoding import Writing
from jaxgpt.inference.generate import Row, generate
from jaxgpt.inference.sampling import Sampling

_CUT_OFF = "\ufffd"
"""What an incomplete character decodes to."""


class Stream:
    """One text as it grows: what of it is certain to stay."""

    def __init__(self, tokenizer: Tokenizer, row: Row, stops: Sequence[str], ends: Sequence[int]) -> None:
        self._tokenizer, self._row, self._stops, self._ends = tokenizer, row, stops, ends
        self._text = ""
        self._before = row.prompt
        """Tokens before those that _text does not stand for yet, which are decoded with them: some tokenizers drop the
        blank before a text's first token, and some make a character of several."""
        self._decoded = 0
        """Tokens that _text stands for."""
        self._given = 0

    def push(self) -> str:
        """What is new after a token, without what the next ones may change; marks the row as done where it ends."""
        if self._row.written[-1] in self._ends:
            self._row.written.pop()
            self._row.done = True
        self._read(self._row.done)
        return self._take(0 if self._row.done else self._held())

    def rest(self) -> str:
        """What was held back."""
        if not self._row.done:
            self._read(True)
        return self._take(0)

    def _read(self, last: bool) -> None:
        """Decodes the tokens that are new, and ends the text before a stop string. last: no tokens follow, which might
        make a whole character of what looks cut off."""
        new = self._row.written[self._decoded :]
        piece = self._tokenizer.decode(self._before + new)[len(self._tokenizer.decode(self._before)) :]
        if piece.endswith(_CUT_OFF) and not last:
            return
        self._text += piece
        self._decoded += len(new)
        self._before = new if piece else self._before + new
        found = [place for place in map(self._text.find, self._stops) if place >= 0]
        if found:
            self._text = self._text[: min(found)]
            self._row.done = True

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        lengths = (n for stop in self._stops for n in range(1, len(stop)) if self._text.endswith(stop[:n]))
        return max(lengths, default=0)

    def _take(self, held: int) -> str:
        end = max(self._given, len(self._text) - held)
        new, self._given = self._text[self._given : end], end
        return new


def write(
    writing: Writing,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    seq: int,
    max_tokens: int,
    sampling: Sampling,
    stops: Sequence[str] = (),
    ends: Sequence[int] = (),
) -> Iterator[list[str]]:
    """Yields what each text gets, round by round; joined, they are what is written after the prompts.

    stops: strings before which a text ends. ends: tokens that end it.
    """
    rows = [Row(list(prompt)) for prompt in prompts]
    streams = [Stream(tokenizer, row, stops, ends) for row in rows]
    for tokens in generate(writing, rows, seq, max_tokens, sampling):
        yield ["" if token is None else stream.push() for token, stream in zip(tokens, streams, strict=True)]
    yield [stream.rest() for stream in streams]
