"""What a row of the layout table changed by hand costs, told before the first step."""

import dataclasses

import jax
from tiny import LLAMA, run_config

from jaxgpt.model.parameters import parameters
from jaxgpt.sharding.mesh import build, parse
from jaxgpt.training import overridden
from jaxgpt.training.program import Program


def program(text: str) -> Program:
    model = dataclasses.replace(LLAMA, mlp_width=256)
    return Program(run_config(model, layout=text), build(parse("tensor=4"), jax.devices()[:4]))


def test_a_feed_forward_layer_on_every_device_is_held_four_times_and_sends_nothing() -> None:
    split, whole = overridden.cost(program("")), overridden.cost(program("mlp=none"))
    mlp = sum(
        p.shape[0] * p.shape[1] * p.shape[2] for n, p in parameters(program("").config.model).items() if ".mlp." in n
    )
    assert whole.state - split.state == 12 * (mlp - mlp // 4)  # fp32 master and two moments
    # of the 4 all-reduces of a block, forward and backward, 2 are left
    activations = 32 * 16 * 32 * 4
    norms = 3 * 4  # the gradient's norm sums three scalars less over tensor
    assert split.received - whole.received == 2 * 3 / 4 * (LLAMA.layers * 2 * activations + norms)
    assert whole.kept > split.kept


def test_the_rows_say_before_after_and_difference() -> None:
    state, kept, received = overridden.rows(program("mlp=none"))
    assert [row[0] for row in (state, kept, received)] == [
        "parameters and optimizer state",
        "kept from forward to backward",
        "received in a step",
    ]
    assert state[-1].startswith("+")
    assert received[-1].startswith("-")
