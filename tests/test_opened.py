"""What is refused before a run's data is read: a model whose state no memory of this host could hold."""

import dataclasses

import pytest
from tiny import GPT, run_config

from jaxgpt import host_memory
from jaxgpt.errors import UserError
from jaxgpt.model.parameters import parameter_count
from jaxgpt.training.console import Console
from jaxgpt.training.opened import devices_for
from jaxgpt.training.run import train

NEED = 12 * parameter_count(dataclasses.replace(GPT, vocab=1))
"""Bytes of fp32 and two moments, without what the tokenizer decides."""


def test_a_model_larger_than_the_host_is_refused_before_its_data_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "available", lambda: NEED - 1)
    config = run_config(GPT, data=str(tmp_path / "there_is_none.txt"))
    with pytest.raises(UserError, match=r"parameters and their moments take .* but the host has"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_that_just_fits_is_not_refused_here(monkeypatch):
    monkeypatch.setattr(host_memory, "available", lambda: NEED)
    devices, sizes = devices_for(run_config(GPT, mesh="data=2"), Console())
    assert (len(devices), sizes["data"]) == (2, 2)


def test_opening_a_trained_model_needs_no_moments(monkeypatch):
    monkeypatch.setattr(host_memory, "available", lambda: NEED - 1)
    assert devices_for(run_config(GPT, mesh="data=2"), Console(), training=False)[0]
