"""A model as EleutherAI's lm-eval wants it (extra lm-eval): likelihoods of texts, and texts written up to a stop.

import lm_eval
from jaxgpt.interop.lm_eval import JaxgptLM
lm_eval.simple_evaluate(JaxgptLM("runs/mine", mesh="tensor=2"), tasks=["lambada_openai"])
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxgpt.errors import UserError, require
from jaxgpt.interop import beside
from jaxgpt.loaded import Run, load

Ids = list[int]
MAX_TOKENS = 256
"""Written where a task does not say how many."""
_SHORTEST = 16
"""Columns of the narrowest batch; others are this by a power of two, so that few programs are compiled."""


class JaxgptLM(TemplateLM):
    """A run, a Hugging Face folder or a GGUF file on a mesh."""

    def __init__(self, run: Run | str | Path, mesh: str = "", batch_size: int = 8, prefix: int | None = None) -> None:
        """run: opened already, or where it is. batch_size: texts at once. prefix: the token before a text that has no
        context; None: the one that ends a text. Raises UserError as jaxgpt.load does, and where there is no such token.
        """
        super().__init__()
        require(batch_size >= 1, "batch_size", batch_size, "must be at least 1")
        self.run = run if isinstance(run, Run) else load(run, mesh)
        if self.run.tokenizer is None:
            raise UserError("the model has no tokenizer, which tasks need; put its tokenizer.json beside it")
        ends = beside.ends(self.run.beside, self.run.tokenizer)
        if prefix is None and not ends:
            raise UserError("the tokenizer has no token that ends a text; give prefix, the token before a text")
        self._prefix = ends[0] if prefix is None else prefix
        self._rows = -(-batch_size // self.run.program.divisors[0]) * self.run.program.divisors[0]
        self._decode_rows = batch_size

    @property
    def eot_token_id(self) -> int:
        """Of the token before a text without context."""
        return self._prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> Ids:
        """Tokens of a text; no special tokens are ever added."""
        assert self.run.tokenizer is not None
        return self.run.tokenizer.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], Ids, Ids]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self.scores([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of each whole text, in windows that each see as much as the context holds."""
        pairs: list[tuple[Ids, Ids]] = []
        counts = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self._prefix, self.run.config.model.seq, context_len=1)
            before = len(pairs)
            pairs += [make_disjoint_window(window) for window in windows]
            counts.append(len(pairs) - before)
        found = iter(self.scores(pairs))
        return [sum(next(found)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each text; "until", "max_gen_toks", "do_sample", "temperature", "top_k" and
        "top_p" are known. Greedy unless a temperature or do_sample says otherwise."""
        found: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        for how, numbers in groups.items():
            for some in _chunks(numbers, self._decode_rows):
                texts = self._written([requests[number].args[0] for number in some], json.loads(how))
                found |= dict(zip(some, texts, strict=True))
        return [found[number] for number in range(len(requests))]

    def _written(self, contexts: list[str], how: dict[str, Any]) -> list[str]:
        count, stop = int(how.get("max_gen_toks", MAX_TOKENS)), how.get("until") or []
        temperature = float(how.get("temperature", 0.0))
        warm = how.get("do_sample", temperature > 0)
        seq = self.run.config.model.seq
        room = max(seq - count, seq // 2, 1)
        prompts = [(self.tok_encode(context) or [self._prefix])[-room:] for context in contexts]
        rounds = self.run.follow(
            prompts,
            count,
            [stop] if isinstance(stop, str) else [text for text in stop if text],
            temperature=(temperature or 1.0) if warm else 0.0,
            top_k=int(how.get("top_k", 0)),
            top_p=float(how.get("top_p", 1.0)),
        )
        return ["".join(pieces) for pieces in zip(*rounds, strict=True)]

    def scores(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
        """For each (context, continuation) in tokens: nats of the continuation's log-likelihood, and whether each of
        its tokens is the likeliest. Of a context that is too long the end is seen.

        Raises UserError for a continuation that is longer than the model's context.
        """
        seq = self.run.config.model.seq
        for _, continuation in pairs:
            fits = len(continuation) <= seq
            require(fits, "a continuation", f"of {len(continuation)} tokens", f"is longer than the context of {seq}")
        texts = [(context + continuation)[-(seq + 1) :] for context, continuation in pairs]
        longest_first = sorted(range(len(pairs)), key=lambda number: -len(texts[number]))
        found: dict[int, tuple[float, bool]] = {}
        for some in _chunks(longest_first, self._rows):
            width = min(seq, _SHORTEST << max(0, (len(texts[some[0]]) - 2) // _SHORTEST).bit_length())
            inputs = np.zeros((self._rows, width), np.int32)
            targets = np.full((self._rows, width), -1, np.int32)
            for row, number in enumerate(some):
                text, counted = texts[number], len(pairs[number][1])
                inputs[row, : len(text) - 1] = text[:-1]
                targets[row, len(text) - 1 - counted : len(text) - 1] = text[len(text) - counted :]
            likelihoods, greedy = self._scored(inputs, targets)
            found |= {number: (float(likelihoods[row]), bool(greedy[row])) for row, number in enumerate(some)}
        return [found[number] for number in range(len(pairs))]

    def _scored(self, inputs: np.ndarray, targets: np.ndarray) -> Any:
        program = self.run.program
        around = ((0, 0), (0, -inputs.shape[1] % program.divisors[1]))
        logits = program.logits(self.run.params, program.place_tokens(np.pad(inputs, around)))
        placed = program.place_tokens(np.pad(targets, around, constant_values=-1))
        return jax.device_get(_likelihoods(logits, placed))


@jax.jit
def _likelihoods(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of logits [B, S, V], wherever they lie: log-likelihood of each row's targets, and whether all are the likeliest.
    Targets below 0 are not counted."""
    highest = jnp.max(logits, -1)
    found = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0.0), -1)
    total = highest + jnp.log(jnp.sum(jnp.exp(logits - highest[..., None]), -1))
    counted = targets >= 0
    wrong = jnp.sum(counted & (found < highest), -1)
    return jnp.sum(jnp.where(counted, found - total, 0.0), -1), wrong == 0


def _chunks(numbers: Iterable[int], size: int) -> Iterator[list[int]]:
    listed = list(numbers)
    return (listed[at : at + size] for at in range(0, len(listed), size))
