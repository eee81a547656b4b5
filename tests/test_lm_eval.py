"""A tiny model under lm-eval, on tasks made on the spot. Needs the package, so these run apart: pytest -m lm_eval."""

import dataclasses
import importlib
from typing import Any

import numpy as np
import pytest
from foreign import FAMILIES, drawn, program

import jaxgpt
from jaxgpt.data.tokenizer import BytesTokenizer
from jaxgpt.errors import UserError
from jaxgpt.interop.export import export

pytestmark = [pytest.mark.lm_eval, pytest.mark.filterwarnings("default")]

SEQ = 24
QUESTIONS = [
    {"question": "one and ", "choices": ["two", " a", "ten more"], "answer": 1},
    {"question": "the sea is", "choices": [" deep", " blue and wide"], "answer": 0},
    {"question": "what is longer than the context holds, ", "choices": ["yes", "no"], "answer": 1},
]
TEXTS = [{"text": "short"}, {"text": "a text that is longer than what the model sees at once, twice"}, {"text": "x"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = dataclasses.replace(FAMILIES["llama"], vocab=256, seq=SEQ)
    of = program(model)
    path = tmp_path_factory.mktemp("lm_eval") / "model"
    export(path, model, drawn(of), of.in_order, BytesTokenizer(), {})
    return path


@pytest.fixture(scope="module")
def adapter() -> Any:
    return importlib.import_module("jaxgpt.interop.lm_eval")


@pytest.fixture(scope="module")
def one(folder):
    return jaxgpt.load(folder)


@pytest.fixture(scope="module", params=["data=1", "data=2,tensor=2", "context=2"])
def model(request, folder, adapter):
    return adapter.JaxgptLM(folder, request.param, batch_size=3, prefix=0)


def direct(run: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """From the logits of the whole text."""
    text = (context + continuation)[-(SEQ + 1) :]
    logits = np.asarray(run(np.array([text[:-1]])), np.float64)[0, -len(continuation) :]
    nats = logits[np.arange(len(continuation)), continuation] - np.log(np.exp(logits).sum(-1))
    return float(nats.sum()), logits.argmax(-1).tolist() == continuation


def evaluated(model: Any, output_type: str, docs: list[dict[str, Any]], **fields: Any) -> tuple[Any, list[Any]]:
    """Results of a task, and what was answered to each of its requests."""
    datasets, harness = importlib.import_module("datasets"), importlib.import_module("lm_eval")
    task = {
        "task": "spot",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(docs)},
        "test_split": "test",
        "output_type": output_type,
        **fields,
    }
    found = harness.simple_evaluate(model, tasks=[task], bootstrap_iters=0)
    return found["results"]["spot"], [sample["resps"] for sample in found["samples"]["spot"]]


def test_a_choice_is_that_of_the_likelihoods(model, one):
    fields = {"doc_to_text": "{{question}}", "doc_to_target": "answer", "doc_to_choice": "choices"}
    metric = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    results, answers = evaluated(model, "multiple_choice", QUESTIONS, target_delimiter="", metric_list=metric, **fields)
    right = []
    for doc, responses in zip(QUESTIONS, answers, strict=True):
        text = doc["question"].rstrip()
        blanks = doc["question"][len(text) :]
        wanted = [direct(one, list(text.encode()), list((blanks + choice).encode())) for choice in doc["choices"]]
        for ((found, greedy),), (nats, likeliest) in zip(responses, wanted, strict=True):
            assert float(found) == pytest.approx(nats, abs=1e-3)
            assert greedy in (likeliest, str(likeliest))
        right.append(int(np.argmax([nats for nats, _ in wanted])) == doc["answer"])
    assert results["acc,none"] == pytest.approx(np.mean(right))


def test_whole_texts_in_windows(model, one):
    metric = [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}]
    fields = {"doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": metric}
    results, answers = evaluated(model, "loglikelihood_rolling", TEXTS, **fields)
    total = 0.0
    for doc, ((found,),) in zip(TEXTS, answers, strict=True):
        ids = [0, *doc["text"].encode()]
        nats, place = 0.0, 1
        while place < len(ids):  # each window sees all that the context holds before its last token
            last = min(place + SEQ, len(ids))
            nats += direct(one, ids[max(0, last - SEQ - 1) : place], ids[place:last])[0]
            place = last
        assert float(found if isinstance(found, (float, str)) else found[0]) == pytest.approx(nats, abs=1e-3)
        total += nats
    size = sum(len(doc["text"].encode()) for doc in TEXTS)
    assert results["bits_per_byte,none"] == pytest.approx(-total / size / np.log(2), rel=1e-4)


def test_texts_up_to_a_stop(model, one):
    docs = [{"text": "ab"}, {"text": "the same words"}, {"text": "c"}, {"text": "longer than the context of the model"}]
    how = {"until": ["\n\n", "zq"], "max_gen_toks": 6, "do_sample": False}
    metric = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    fields = {"doc_to_text": "{{text}}", "doc_to_target": "{{text}}", "generation_kwargs": how, "metric_list": metric}
    _, answers = evaluated(model, "generate_until", docs, **fields)
    wanted = [one.generate(doc["text"][-(SEQ - 6) :], 6, temperature=0, stop=how["until"]) for doc in docs]
    assert [responses[0][0] for responses in answers] == wanted


def test_without_a_token_before_a_text_one_must_be_given(folder, adapter):
    with pytest.raises(UserError, match="give prefix"):
        adapter.JaxgptLM(folder)


def test_a_continuation_beyond_the_context_is_refused(model):
    with pytest.raises(UserError, match="longer than the context of 24"):
        model.scores([([1], [2] * 25)])
