"""Text from a model: one token after another, the same on every mesh for the same seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jaxgpt.inference.decoding import Ahead, Writing
from jaxgpt.inference.sampling import Sampling


@dataclass
class Row:
    """One text of a batch."""

    prompt: list[int]
    written: list[int] = field(default_factory=list)
    done: bool = False
    """Set by whoever reads it: nothing more is written of it."""
    forgotten: int = 0
    """Tokens at its beginning that the model no longer sees."""

    @property
    def seen(self) -> list[int]:
        """The tokens that the model sees."""
        return (self.prompt + self.written)[self.forgotten :]


def generate(
    writing: Writing, rows: Sequence[Row], seq: int, max_tokens: int, sampling: Sampling
) -> Iterator[list[int | None]]:
    """Writes up to max_tokens tokens of each row, and yields those of each round, None of a row that is done.

    The model sees at most `seq` tokens. Where a text has grown beyond that, its older half is forgotten and the rest is
    read again, so that this happens once in seq / 2 tokens. When that is, follows from the row alone: what is written
    of a row does not depend on the others (but for its noise, which its number decides).
    """
    for row in rows:
        row.forgotten = max(0, len(row.prompt) - seq)
    scores = writing.start([row.seen for row in rows], max_tokens)
    ahead = _ahead(writing, sampling, max_tokens)
    for count in range(max_tokens):
        chosen = None if ahead is None else next(ahead)
        round_: list[int | None] = []
        for number, row in enumerate(rows):
            token = None
            if not row.done:
                text = row.prompt + row.written
                token = sampling.choose(scores[number], text, number, count) if chosen is None else chosen[number]
                row.written.append(token)
            round_.append(token)
        yield round_
        if count + 1 == max_tokens or all(row.done for row in rows):
            return
        full = [row for row in rows if len(row.seen) > seq]
        if full or not writing.left:
            for row in full:
                row.forgotten += len(row.seen) - max(1, seq // 2)
            for row in rows:
                row.forgotten += len(row.seen) - 1 if row.done else 0
            scores = writing.start([row.seen for row in rows], max_tokens - count - 1)
            ahead = _ahead(writing, sampling, max_tokens - count - 1)
        elif ahead is None:
            scores = writing.next([0 if token is None else token for token in round_])


def _ahead(writing: Writing, sampling: Sampling, rounds: int) -> Iterator[list[int]] | None:
    """The rounds to come, where all that is asked for is the likeliest token."""
    return writing.likeliest(rounds) if sampling.greedy and isinstance(writing, Ahead) else None
