"""What shows itself in a notebook: plans, explanations, layouts, a loss curve that grows."""

import dataclasses
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import GPT

import jaxgpt
from jaxgpt.explained import tables
from jaxgpt.sharding.drawing import coloured
from jaxgpt.training import live

CONFIG = jaxgpt.RunConfig(model=GPT, tokenizer="bytes", mesh="fsdp=2,tensor=2", dtype="fp32", global_batch=8)


def test_an_explanation_is_the_verbs():
    told = jaxgpt.explain(CONFIG)
    assert all(title in repr(told) for title, _ in tables(told.found))
    assert "embedding.token.weight" in repr(told)
    html = told._repr_html_()
    assert html.count("<table>") == len(told.tables)
    assert 'background:hsl(288,70%,85%);padding:0 3px">tensor: S(vocab)</span>' in html


def test_a_plan_applies_to_its_configuration():
    told = jaxgpt.plan(dataclasses.replace(CONFIG, mesh=""), devices=4, hardware="h100", top=2)
    best = told.found.plans[0].plan.apply(CONFIG)
    assert math.prod(told.found.plans[0].plan.sizes.values()) == 4
    assert best.mesh in repr(told)
    assert "4 x h100" in told._repr_html_()
    assert jaxgpt.plan(CONFIG, devices=2, top=1).found.space.hardware == "cpu"


def test_a_model_begins_as_its_run_would():
    run = jaxgpt.start(CONFIG)
    assert run.config.model.vocab == 256
    assert run.generate("ab", 3) != ""
    assert "fsdp: S(embed), tensor: S(mlp)" in re.sub("<[^>]*>", "", run.layouts()._repr_html_())
    again = jaxgpt.start(dataclasses.replace(CONFIG, mesh="data=1"))
    for name, array in run.params.items():
        np.testing.assert_array_equal(array, again.params[name])


def test_only_axes_are_coloured_and_text_stays_text():
    assert coloured("a < b, data: S(batch)").startswith("a &lt; b, <span")
    assert coloured("metadata: S(x), data: B") == "metadata: S(x), data: B"


class Shell(SimpleNamespace):
    """What stands for a notebook."""

    def __init__(self):
        super().__init__(pictures=[])
        self.display = SimpleNamespace(display=self.show, HTML=lambda text: text)

    def show(self, picture, display_id):
        assert display_id
        self.pictures.append(picture)
        return SimpleNamespace(update=self.pictures.append)

    def get_ipython(self):
        return SimpleNamespace(kernel=None)


def test_in_a_notebook_losses_are_a_curve_that_grows(monkeypatch):
    shell = Shell()
    monkeypatch.setitem(sys.modules, "IPython", shell)
    with live.shown(1000, quiet=False) as shown:
        for step in range(1, 1001):
            shown.step([8.0 - 1e-3 * n for n in range(step)])
    assert shell.pictures[0] == "<div>0 / 1000 steps</div>"
    assert len(shell.pictures) >= 3
    assert "step 1000 / 1000, loss 7.0010, from 8.0000, lowest 7.0010" in shell.pictures[-1]
    points = re.search(r'points="([^"]*)"', shell.pictures[-1])[1].split()
    assert 300 < len(points) <= 401
    (first, top), (last, bottom) = (tuple(map(float, point.split(","))) for point in (points[0], points[-1]))
    assert first < last <= live.WIDTH
    assert top < bottom <= live.HEIGHT


@pytest.mark.parametrize("losses", [[2.0], [2.0, 2.0, float("nan")]])
def test_a_curve_of_little(losses):
    assert f"step {len(losses)} / 9" in live.svg(losses, 9)


def test_elsewhere_losses_are_a_bar(capsys):
    with live.shown(2, quiet=False) as shown:
        assert isinstance(shown, live.Bar)
        shown.step([3.0])
        shown.step([3.0, 2.5])
    assert "2/2 loss 2.5000" in capsys.readouterr().out
