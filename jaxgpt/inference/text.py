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
        self._decoded = 0
        """Tokens that _text stands for."""
        self._given = 0

    def push(self) -> str:
        """What is new after a token, without what the next ones may change; marks the row as done where it ends."""
        written = self._row.written
        if written[-1] in self._ends:
            written.pop()
            self._row.done = True
        # a token of context, since some tokenizers drop the blank before a text's first token
        begin = max(0, self._decoded - 4)
        before = self._tokenizer.decode(written[begin : self._decoded])
        piece = self._tokenizer.decode(written[begin:])[len(before) :]
        if not piece.endswith(_CUT_OFF) or self._row.done:
            self._text += piece
            self._decoded = len(written)
        found = [place for place in map(self._text.find, self._stops) if place >= 0]
        if found:
            self._text = self._text[: min(found)]
            self._row.done = True
        return self._take(0 if self._row.done else self._held())

    def rest(self) -> str:
        """What was held back."""
        if not self._row.done:
            self._text += self._tokenizer.decode(self._row.written[self._decoded :])
        return self._take(0)

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
