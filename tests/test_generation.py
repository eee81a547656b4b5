"""Generation with a cache: what it reads is what the full forward says, on every mesh; and which tokens are drawn."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
from foreign import FAMILIES, drawn, program
from quickly import unoptimized

from jaxgpt.data.tokenizer import BytesTokenizer
from jaxgpt.errors import UserError
from jaxgpt.inference.decoding import CHUNK, Decoding, enough
from jaxgpt.inference.generate import Row, generate
from jaxgpt.inference.sampling import Sampling
from jaxgpt.inference.text import write

MESHES = [
    ("gpt2", "data=2"),
    ("llama", "fsdp=2"),
    ("gpt2", "tensor=2"),
    ("llama", "tensor=8"),  # more devices than key-value heads
    ("gpt2", "pipe=2"),  # three layers: one stage has an empty row
    ("llama", "context=2"),
    ("llama", "pipe=2,fsdp=2,tensor=2"),
    *((family, "data=2,tensor=2") for family in ("gpt_neox", "mistral", "qwen2", "qwen3")),
]
TEXTS = [[1, 2, 3, 4, 5, 6, 7], [9], [11, 12, 13]]
LONG = CHUNK + 30
"""More tokens than are read at once."""


@pytest.fixture(autouse=True)
def cheaply():
    with unoptimized():
        yield


def model(family: str, seq: int = 16):
    return dataclasses.replace(FAMILIES[family], seq=seq, layers=3)


def full(of, params, texts):
    """fp32 logits of the last token of each text, by the forward that has no cache; one device's."""
    tokens = np.zeros((len(texts), of.config.model.seq), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text  # what lies to the right of a token cannot change its logits
    logits = np.asarray(of.logits(params, of.place_tokens(tokens)))
    return logits[np.arange(len(texts)), [len(text) - 1 for text in texts], : of.config.model.vocab]


def close(found, wanted):
    assert found.shape == wanted.shape
    assert float(np.abs(found - wanted).max()) <= 1e-5 * float(np.abs(wanted).max())


def decoded(of, params, texts, more):
    """Logits after the texts and after each of the tokens that follow."""
    writing = Decoding(of.decoder, params)
    found = [writing.start(texts, len(more))]
    return [*found, *(writing.next(tokens) for tokens in more)]


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_is_the_full_forward(family):
    of = program(model(family))
    params = drawn(of)
    more = [[21, 22, 23], [24, 25, 26], [3, 2, 1]]
    texts = [list(text) for text in TEXTS]
    for logits, tokens in zip(decoded(of, params, TEXTS, more), [*more, None], strict=True):
        close(logits, full(of, params, texts))
        if tokens is not None:
            texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]


@pytest.mark.parametrize(("family", "mesh"), MESHES)
def test_decoding_is_the_same_on_every_mesh(family, mesh):
    one, many = program(model(family)), program(model(family), mesh)
    more = [[21, 22, 23], [24, 25, 26]]
    wanted = decoded(one, drawn(one), TEXTS, more)
    for found, expected in zip(decoded(many, drawn(many), TEXTS, more), wanted, strict=True):
        close(found, expected)


@pytest.mark.parametrize("fields", [{"zero": 3}, {"sequence_parallel": True}, {"layout": "seq=tensor,vocab=none"}])
def test_layouts_of_training_do_not_stand_in_the_way(fields):
    one, many = program(model("llama")), program(model("llama"), "data=2,fsdp=2,tensor=2", **fields)
    for found, wanted in zip(decoded(many, drawn(many), TEXTS, []), decoded(one, drawn(one), TEXTS, []), strict=True):
        close(found, wanted)


def test_a_batch_of_ragged_prompts_is_each_of_them_alone():
    of = program(model("llama", 128))
    params, texts = drawn(of), [[5] * LONG, [7, 8], list(range(1, 64))]
    more = [[3, 4, 5], [6, 7, 8]]
    together = decoded(of, params, texts, more)
    for row, text in enumerate(texts):
        for found, alone in zip(together, decoded(of, params, [text], [[m[row]] for m in more]), strict=True):
            close(found[row], alone[0])


def test_one_program_reads_prompts_of_any_length_and_one_writes():
    of = program(model("gpt2", 256))
    writing = Decoding(of.decoder, drawn(of))
    for length in (1, 5, 65, 120, 190):
        writing.start([[1] * length], 60)
        writing.next([2])
        writing.next([3])
    # a chunk and a token, in caches of 96, 192, 256 slots
    assert of.decoder.extend._cache_size() <= 6


def test_a_cache_has_room_and_few_sizes():
    sizes = [enough(slots) for slots in range(1, 1025)]
    assert all(slots <= size < 1.5 * slots for slots, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 20


def texts(of, params, prompts, count, sampling, seq=16):
    rows = [Row(list(prompt)) for prompt in prompts]
    for _ in generate(Decoding(of.decoder, params), rows, seq, count, sampling):
        pass
    return [row.written for row in rows]


def test_texts_are_the_same_on_every_mesh_beyond_the_context_too():
    found = []
    for mesh in ("data=1", "data=2,tensor=4", "context=2,tensor=2", "pipe=2"):
        of = program(model("llama"), mesh)
        found.append(texts(of, drawn(of), [[1, 2], [3] * 20, [4]], 40, Sampling(seed=5)))
    assert found[0] == found[1] == found[2] == found[3]
    assert [len(text) for text in found[0]] == [40] * 3
    assert max(max(text) for text in found[0]) < FAMILIES["llama"].vocab


def test_a_batch_writes_what_each_writes_alone_beyond_the_context_too():
    of = program(model("llama"))
    params, prompts, greedy = drawn(of), [[1, 2], [3] * 15, [4, 5, 6, 7]], Sampling(temperature=0)
    together = texts(of, params, prompts, 30, greedy)
    assert together == [texts(of, params, [prompt], 30, greedy)[0] for prompt in prompts]


class OnTheHost(NamedTuple):
    """A model that cannot choose by itself."""

    model: Decoding

    @property
    def left(self):
        return self.model.left

    def start(self, texts, room):
        return self.model.start(texts, room)

    def next(self, tokens):
        return self.model.next(tokens)


@pytest.mark.parametrize("mesh", ["data=1", "data=2,tensor=2"])
def test_tokens_that_are_asked_for_ahead_are_those_that_the_host_would_choose(mesh):
    of = program(model("llama"), mesh)
    params, written = drawn(of), []
    for wrapped in (False, True):
        decoding = Decoding(of.decoder, params)
        rows = [Row([1, 2]), Row([3] * 15), Row([4, 5, 6, 7])]
        rounds = generate(OnTheHost(decoding) if wrapped else decoding, rows, 16, 30, Sampling(temperature=0))
        for count, _ in enumerate(rounds):
            rows[2].done = count >= 3
        written.append([row.written for row in rows])
    assert written[0] == written[1]
    assert list(map(len, written[0])) == [30, 30, 4]


def test_of_equally_likely_tokens_the_first_is_taken():
    of = program(model("gpt2"))
    scores = np.array([[0.0, 2.0, 2.0, 1.0], [3.0, -1.0, 3.0, 3.0]], np.float32)
    assert np.asarray(of.decoder.likeliest(of.decoder.place(scores))).tolist() == [[1], [0]]


def test_after_the_context_is_full_the_model_sees_the_later_half():
    of = program(model("gpt2", 8))
    params = drawn(of)
    (written,) = texts(of, params, [[1, 2, 3, 4, 5, 6, 7, 8]], 2, Sampling(temperature=0), seq=8)
    first = int(full(of, params, [[1, 2, 3, 4, 5, 6, 7, 8]])[0].argmax())
    assert written == [first, int(full(of, params, [[6, 7, 8, first]])[0].argmax())]


# Which token


SCORES = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))


def shares(sampling: Sampling, text=(), count=4000):
    drawn = [dataclasses.replace(sampling, seed=seed).choose(SCORES, text, 0, 0) for seed in range(count)]
    return np.bincount(drawn, minlength=5) / count


def test_greedy_takes_the_likeliest():
    assert Sampling(temperature=0).choose(SCORES, [], 0, 0) == 0


def test_temperature_one_draws_the_softmax():
    np.testing.assert_allclose(shares(Sampling(temperature=1)), np.exp(SCORES), atol=0.03)


def test_top_k_and_top_p_leave_out_the_rest():
    np.testing.assert_allclose(shares(Sampling(temperature=1, top_k=2)), [2 / 3, 1 / 3, 0, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(Sampling(temperature=1, top_p=0.6)), [2 / 3, 1 / 3, 0, 0, 0], atol=0.03)
    assert shares(Sampling(temperature=1, top_p=0.5), count=50)[0] == 1
    assert shares(Sampling(temperature=1, top_p=0.01), count=50)[0] == 1


def test_the_penalty_acts_on_tokens_of_the_text_alone():
    scores = np.array([2.0, 1.5, -1.0], np.float32)
    assert Sampling(temperature=0, repetition_penalty=2).choose(scores, [0, 2], 0, 0) == 1
    assert Sampling(temperature=0, repetition_penalty=2).choose(scores, [1, 2], 0, 0) == 0
    np.testing.assert_array_equal(scores, np.array([2.0, 1.5, -1.0], np.float32))


def test_noise_is_of_seed_row_and_place():
    flat = np.zeros(1000, np.float32)
    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    found = [Sampling(seed=s).choose(flat, [], row, count) for s, row, count in places]
    assert len(set(found)) == 4
    assert found == [Sampling(seed=s).choose(flat, [], row, count) for s, row, count in places]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", -1.0, "--temperature -1.0"),
        ("temperature", float("nan"), "--temperature nan"),
        ("top_k", -1, "--top-k -1"),
        ("top_p", 0.0, "--top-p 0.0"),
        ("top_p", 1.5, "--top-p 1.5"),
        ("repetition_penalty", 0.0, "--repetition-penalty 0.0"),
        ("seed", -1, "--seed -1"),
    ],
)
def test_refused(field, value, says):
    with pytest.raises(UserError, match=says):
        Sampling(**{field: value})


# Text


class Told:
    """Writes what it is told to."""

    def __init__(self, *texts: bytes) -> None:
        self.texts, self.place, self.left = texts, 0, 1000

    def _scores(self):
        scores = np.zeros((len(self.texts), 256), np.float32)
        for row, text in enumerate(self.texts):
            scores[row, text[self.place] if self.place < len(text) else 0] = 1
        return scores

    def start(self, texts, room):
        return self._scores()

    def next(self, tokens):
        self.place += 1
        return self._scores()


def written(*texts: str, count=None, stops=(), ends=()):
    told = [text.encode() for text in texts]
    count = count or max(map(len, told))
    rounds = list(
        write(Told(*told), BytesTokenizer(), [[1]] * len(told), 999, count, Sampling(temperature=0), stops, ends)
    )
    return rounds, ["".join(pieces) for pieces in zip(*rounds, strict=True)]


def test_text_comes_piece_by_piece_and_characters_whole():
    rounds, (text,) = written("aä€b")
    assert text == "aä€b"
    assert all("\ufffd" not in piece for (piece,) in rounds)
    assert rounds[0] == ["a"]


def test_what_never_becomes_a_character_is_given_at_the_end():
    _, (text,) = written("aä", count=2)
    assert text == "a\ufffd"


def test_a_stop_string_ends_its_own_row_alone():
    rounds, texts = written("one. two", "three four", stops=[". ", "zz"])
    assert texts == ["one", "three four"]
    assert all("." not in piece for piece, _ in rounds)


def test_the_beginning_of_a_stop_string_that_does_not_come_is_text():
    assert written("one.two.", stops=[". "])[1] == ["one.two."]


def test_an_end_token_ends_and_is_not_text():
    _, texts = written("ab\0cd", "xyzxyz", ends=(0,))
    assert texts == ["ab", "xyzxyz"]
    assert len(written("ab\0cd", ends=(0,))[0]) == 4
