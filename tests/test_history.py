"""A run whose global batch or blend changes goes on with the samples that come next, and says so."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bigram import Bigram, config, text

from jaxgpt.data import Prefetcher, blend, megatron, open_mixture
from jaxgpt.errors import UserError
from jaxgpt.training import folder, history, metrics, run
from jaxgpt.training.reading import Reading

pytest_plugins = ["run_fixtures"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The inputs of every training batch placed."""
    found: list[np.ndarray] = []
    real = Bigram.step

    def step(self: Bigram, state: Any, batch: Any) -> Any:
        found.append(np.asarray(batch["inputs"]))
        return real(self, state, batch)

    monkeypatch.setattr(Bigram, "step", step)
    return found


def test_another_global_batch_goes_on_from_the_samples_read(
    data: Path, tmp_path: Path, seen: list[np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "run"
    run.train(config(data, steps=3, eval_every=0), where)
    capsys.readouterr()
    run.train(config(data, steps=5, global_batch=8, eval_every=0), where, frozenset({"steps", "global_batch"}))
    assert "global batch: 4 -> 8; goes on after the 12 samples read so far" in capsys.readouterr().out
    run.train(config(data, steps=6, eval_every=0), where, frozenset({"steps"}))
    assert "->" not in capsys.readouterr().out.replace("5 -> 6", "")
    run.train(config(data, steps=8, global_batch=2, eval_every=0), where, frozenset({"steps", "global_batch"}))
    order = open_mixture(str(data), "bytes", 256, 0.05).batch(8, 0, np.arange(40))["inputs"]
    assert [len(batch) for batch in seen] == [4, 4, 4, 8, 8, 8, 2, 2]
    np.testing.assert_array_equal(np.concatenate(seen), order)
    assert [(phase.step, phase.sample) for phase in history._read(where)] == [(0, 0), (3, 12), (6, 36)]


def test_a_change_that_was_lost_with_its_checkpoint_begins_where_the_run_does(data: Path, tmp_path: Path) -> None:
    where = tmp_path / "run"
    mixture = open_mixture(str(data), "bytes", 256, 0.05)
    where.mkdir()
    small, large = config(data), config(data, global_batch=8)
    history.first(where, small, history.shares(mixture))
    said: list[str] = []
    assert history.resume(where, large, mixture, 10, said.append)[0] == 40
    assert history.resume(where, large, mixture, 12, said.append)[0] == 56
    assert len(said) == 1
    assert history.resume(where, large, mixture, 6, said.append)[0] == 24
    assert history.resume(where, large, mixture, 7, said.append)[0] == 32
    assert history.resume(where, small, mixture, 6, said.append)[0] == 24
    assert len(history._read(where)) == 2
    assert history.resume(where, small, mixture, 7, said.append)[0] == 28


def test_another_blend_goes_on_where_each_source_was(
    data: Path, tmp_path: Path, seen: list[np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text().upper())
    where = tmp_path / "run"
    run.train(config(data, steps=3, eval_every=0), where)
    blended = f"1:{data},1:{other}"
    capsys.readouterr()
    run.train(config(Path(blended), steps=5, eval_every=0), where)
    assert "goes on after the 12 samples read so far" in capsys.readouterr().out
    run.train(config(Path(f"1:{other}"), steps=6, eval_every=0), where)
    found = [open_mixture(str(each), "bytes", 256, 0.05).batch(8, 0, np.arange(20))["inputs"] for each in (data, other)]
    together = np.concatenate(seen)
    upper = np.array([bytes(row.tolist()).decode().isupper() for row in together])
    np.testing.assert_array_equal(together[~upper], found[0][:16])
    np.testing.assert_array_equal(together[upper], found[1][:8])
    assert run.evaluate(where).tokens == len(open_mixture(str(other), "bytes", 256, 0.05).validation[0]) - 1


def test_a_blend_keeps_the_tokenizer_that_it_began_with(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text()[::-1])
    where = tmp_path / "run"
    run.train(config(data, tokenizer="chars", prompt="", steps=1, eval_every=0), where)
    before = (where / "tokenizer" / "jaxgpt_tokenizer.json").read_text()
    run.train(config(Path(f"3:{data},1:{other}"), tokenizer="chars", prompt="", steps=2, eval_every=0), where)
    assert (where / "tokenizer" / "jaxgpt_tokenizer.json").read_text() == before
    assert run.train(folder.stored_config(where), where).step == 2
    other.write_text("§" * 5000)
    with pytest.raises(UserError, match="is not among the"):
        run.train(config(Path(f"2:{data},1:{other}"), tokenizer="chars", prompt="", steps=3), where)


def test_a_blend_of_changed_texts_is_refused(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text().upper())
    blended = Path(f"1:{data},1:{other}")
    where = tmp_path / "run"
    run.train(config(blended, steps=1, eval_every=0), where)
    other.write_text(text().upper() * 2)
    with pytest.raises(UserError, match="has changed since the run began"):
        run.train(config(blended, steps=2), where)


def test_paths_of_a_blend_are_stored_in_full(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data.parent)
    shutil.copy(data, tmp_path / "other.txt")
    (tmp_path / "other.txt").write_text(text().upper())
    run.train(config(Path(f"0.5:text.txt,0.5:{tmp_path}/other.txt"), steps=1, eval_every=0), tmp_path / "run")
    stored = folder.stored_config(tmp_path / "run").data
    assert blend.parse(stored) == (blend.Part(1, str(data)), blend.Part(1, f"{tmp_path}/other.txt"))
    monkeypatch.chdir(tmp_path)
    assert run.train(folder.stored_config(tmp_path / "run"), tmp_path / "run", frozenset()).step == 1


def test_a_run_from_before_blends_goes_on(data: Path, straight: Path) -> None:
    (straight / "samples.json").unlink()
    assert run.train(config(data, steps=14, global_batch=8), straight).step == 14
    assert [(phase.step, phase.sample) for phase in history._read(straight)] == [(0, 0), (12, 48)]


def test_reading_is_in_the_metrics(data: Path, straight: Path) -> None:
    last = [r for r in metrics.read(straight) if r["kind"] == "train"][-1]
    assert last["data_wait_milliseconds"] >= 0
    assert last["data_read_milliseconds/0"] >= 0
    assert last["data_epochs/0"] == pytest.approx(48 / open_mixture(str(data), "bytes", 256, 0.05).samples(8)[0])


def test_a_slow_source_is_said_once(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text().upper())
    mixture = open_mixture(f"1:{data},3:{other}", "bytes", 256, 0.05)
    with Prefetcher(lambda step: mixture.batch(8, 0, np.arange(step, step + 1)), 0, 3) as batches:
        list(batches)
    batches.waited, mixture.seconds = 0.0, [0.0, 0.0]
    measured = Reading(mixture, 8, batches, 10)
    assert measured.read(12, 8)["data_wait_milliseconds"] == 0
    assert measured.slow(100) is None
    batches.waited, mixture.seconds = 0.08, [0.01, 0.07]
    found = measured.read(16, 24)
    assert found["data_wait_milliseconds"] == pytest.approx(20)
    assert found["data_read_milliseconds/1"] == pytest.approx(17.5)
    assert found["data_epochs/1"] == pytest.approx(18 / mixture.samples(8)[1])
    said = measured.slow(100)
    assert said is not None
    assert said.startswith("data: a step waits 20 of its 100 ms")
    assert said.endswith(f"reading {other}")
    assert measured.slow(100) is None


@pytest.mark.parametrize("content", ["[{}]", "[]", "{}", "null", "["])
def test_a_damaged_history_is_named(content: str, data: Path, straight: Path) -> None:
    (straight / "samples.json").write_text(content)
    with pytest.raises(UserError, match=r"samples\.json: is damaged"):
        run.train(config(data, steps=14), straight)


def test_tokens_of_another_tokenizer_are_named_where_only_validation_has_them(data: Path, tmp_path: Path) -> None:
    """A look-up would take the last entry in their place, and the loss would be of another text."""
    text = np.arange(4000) % 200
    megatron.write(tmp_path / "tokens", [text, np.full(20, 300)], 40_000)
    with pytest.raises(UserError, match="--data: token 300 of the validation part is outside of the model's 256 entr"):
        run.train(config(tmp_path / "tokens", steps=1), tmp_path / "run")
