"""What a run reads: batches of one source and of several, the edges of documents, validation of all of them."""

import json

import numpy as np
import pytest

from jaxgpt.data import NO_TARGET, loader, megatron, open_mixture, training_batch
from jaxgpt.data.megatron import Documents
from jaxgpt.data.mixture import validation_batches
from jaxgpt.errors import UserError

SEQ = 8


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Three sources of bytes that tell where they come from."""
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, size in (("a", 4000), ("b", 1500), ("c", 700)):
        (tmp_path / f"{name}.txt").write_text(name * size)
    return tmp_path


def opened(data, **fields):
    return open_mixture(data, "bytes", 256, 0.1, **fields)


BLEND = "0.5:a.txt,0.3:b.txt,0.2:c.txt"


# Batches


def test_one_source_is_read_as_ever(here):
    for data in ("a.txt", "1:a.txt"):
        mixture = opened(data)
        batch = mixture.batch(SEQ, 7, np.arange(30, 90))
        expected = training_batch(mixture.datasets[0].train, SEQ, 7, 30, 60)
        np.testing.assert_array_equal(batch["inputs"], expected[:, :-1])
        np.testing.assert_array_equal(batch["targets"], expected[:, 1:])
        assert set(batch) == {"inputs", "targets"}
    assert opened("a.txt").fingerprint == opened("1:a.txt").fingerprint


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_any_process_reads_its_own_part_and_gets_the_same(here, processes):
    mixture = opened(BLEND)
    whole = mixture.batch(SEQ, 3, np.arange(200, 264))
    for process in range(processes):
        mine = np.arange(200 + process, 264, processes)
        part = opened(BLEND).batch(SEQ, 3, mine)
        for name in whole:
            np.testing.assert_array_equal(part[name], whole[name][process::processes])


def test_a_blend_has_its_shares_and_each_source_its_epochs(here):
    mixture = opened(BLEND)
    text = mixture.batch(SEQ, 3, np.arange(1000))["inputs"][:, 0]
    assert [(text == ord(name)).sum() for name in "abc"] == [500, 300, 200]
    source, sample = mixture.order(SEQ, 3, np.arange(1000))
    for k, count in enumerate(mixture.samples(SEQ)):
        mine = sample[source == k][:count]
        assert len(set(mine.tolist())) == len(mine)
    assert mixture.taken(1000) == [500, 300, 200]


def test_another_blend_goes_on_where_each_source_was(here):
    before = opened(BLEND)
    names = dict(zip((d.fingerprint for d in before.datasets), before.taken(100), strict=True))
    after = opened("1:c.txt,1:a.txt").beginning(100, names)
    assert after.had == (20, 50)
    alone = opened("a.txt").order(SEQ, 3, np.arange(200))[1]
    assert before.order(SEQ, 3, np.arange(100))[1][before.order(SEQ, 3, np.arange(100))[0] == 0].tolist() == (
        alone[:50].tolist()
    )
    source, sample = after.order(SEQ, 3, np.arange(100, 160))
    assert sample[source == 1].tolist() == alone[50:80].tolist()
    assert after.taken(160) == [50, 80]


def test_sources_that_are_the_same_are_refused(here):
    (here / "copy.txt").write_text((here / "a.txt").read_text())
    with pytest.raises(UserError, match=r"a\.txt and copy\.txt hold the same tokens"):
        opened("1:a.txt,1:copy.txt")


def test_a_source_that_is_too_short_is_named(here):
    (here / "short.txt").write_text("123456789")
    with pytest.raises(UserError, match=r"the training part of short\.txt has 8 tokens, fewer than the 9"):
        opened("1:a.txt,1:short.txt").check(SEQ)


def test_a_tokenizer_is_made_from_all_sources_once(here):
    told: list[str] = []
    mixture = open_mixture("1:a.txt,1:b.txt", "chars", 256, 0.1, say=told.append)
    assert mixture.tokenizer.decode([0, 1]) == "ab"
    assert len({d.tokenizer.fingerprint() for d in mixture.datasets}) == 1
    told.clear()
    again = open_mixture("2:b.txt,1:a.txt", "chars", 256, 0.1, say=told.append)
    assert told == []
    assert again.tokenizer.decode([0, 1]) == "ab"


# Where documents end


def test_starts_and_targets_stop_at_a_documents_edge(here):
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 20, 300)
    # the token of a document is its number, so that what it sees of another one shows
    megatron.write(here / "m", [np.full(n, i % 250) for i, n in enumerate(lengths)], 256)
    mixture = opened("m")
    positions = np.arange(150)
    joined = mixture.batch(16, 0, positions)
    masked = mixture.batch(16, 0, positions, "masked")
    found = mixture.batch(16, 0, positions, "separate")
    np.testing.assert_array_equal(joined["inputs"], found["inputs"])
    np.testing.assert_array_equal(masked["targets"], found["targets"])
    assert set(found) == {"inputs", "targets", "starts"}
    assert set(masked) == {"inputs", "targets"}
    crossing = joined["targets"] != joined["inputs"]
    assert 0 < crossing.sum() < crossing.size
    np.testing.assert_array_equal(masked["targets"], np.where(crossing, NO_TARGET, joined["targets"]))
    for inputs, starts in zip(found["inputs"], found["starts"], strict=True):
        runs = np.cumsum(np.diff(inputs, prepend=inputs[0]) != 0).tolist()
        assert starts.tolist() == [runs.index(run) for run in runs]


def test_empty_documents_and_none_at_all():
    starts = np.array([0, 4, 4, 4, 9])
    begins = loader.begins(Documents(5, lambda which: starts[which]), np.array([0, 4]), 6)
    assert begins.astype(int).tolist() == [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]
    assert not loader.begins(Documents(0, lambda which: which), np.array([0, 4]), 6).any()


def test_lines_are_documents(here):
    (here / "x.jsonl").write_text("".join(json.dumps({"text": f"{i:03}"}) + "\n" for i in range(300)))
    batch = opened("x.jsonl").batch(32, 0, np.arange(20), "separate")
    # three digits and the boundary of two line ends
    for inputs, starts in zip(batch["inputs"], batch["starts"], strict=True):
        text = bytes(inputs.tolist()).decode()
        for start in sorted(set(starts.tolist()))[1:-1]:
            assert text[start:][:5].endswith("\n\n")


# Validation


def test_every_validation_token_of_every_source_is_a_target_once(here):
    mixture = opened(BLEND)
    batches = [each["targets"] for each in validation_batches(mixture.validation, SEQ, 4)]
    targets = np.concatenate([t[t != NO_TARGET] for t in batches])
    assert len(targets) == sum(len(part) - 1 for part in mixture.validation)
    for part in mixture.validation:
        assert (targets == part[0]).sum() == len(part) - 1
    limited = [each["targets"] for each in validation_batches(mixture.validation, SEQ, 4, 200)]
    assert 150 <= sum((t != NO_TARGET).sum() for t in limited) <= 200
    assert mixture.validation_bytes == sum(map(len, mixture.validation))


def test_validation_knows_its_documents(here):
    lengths = np.random.default_rng(1).integers(1, 20, 300)
    megatron.write(here / "m", [np.full(n, i % 250) for i, n in enumerate(lengths)], 256)
    (here / "x.jsonl").write_text("".join(json.dumps({"text": f"{i:03}"}) + "\n" for i in range(300)))
    for source, begins in (("m", lambda a, b: a != b), ("x.jsonl", lambda a, b: (a == 10) & (b != 10))):
        mixture = opened(source)
        (part,), documents = mixture.validation, mixture.validation_documents
        edge = begins(part[:-1].astype(int), part[1:].astype(int))  # whether the next token is another document's
        assert 0 < edge.sum() < len(edge)
        for edges in ("joined", "masked", "separate"):
            found = list(validation_batches([part], SEQ, 4, documents=documents, edges=edges))
            counted = np.concatenate([each["targets"] for each in found]).ravel()[: len(edge)] != NO_TARGET
            assert counted.tolist() == (np.ones(len(edge), bool) if edges == "joined" else ~edge).tolist()
        starts = np.concatenate([each["starts"] for each in found])
        begun = (starts == np.arange(SEQ)).ravel()
        for place in range(1, len(edge)):
            assert begun[place] == edge[place - 1] or place % SEQ == 0
