"""In what XLA makes of a program for CPUs, collectives have one order: none of a loop or a conditional is beside others
that need nothing of it, for then devices that share a pool of threads can wait for each other for ever."""

import dataclasses
import re

import jax
import pytest
from tiny import GPT, LLAMA, run_config

from jaxgpt.sharding import mesh
from jaxgpt.sharding.collectives import after
from jaxgpt.sharding.entry import shard_map
from jaxgpt.sharding.hlo import KINDS
from jaxgpt.training.program import Program

pytestmark = pytest.mark.core
NESTED = ("while", "conditional", "call")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*)$")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
CALLED = re.compile(r"(?:body|condition|to_apply|calls|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)")


def computations(text):
    """Of each computation its instructions: name, opcode, what they need, and the computations that they call."""
    found, current = {}, None
    for line in text.splitlines():
        if (begins := COMPUTATION.match(line)) and not line.startswith(" "):
            current = found[begins[1]] = []
        elif current is not None and (one := INSTRUCTION.match(line)):
            rest = one[3].split("metadata=")[0]
            called = [name for names in CALLED.findall(rest) for name in re.findall(r"%([\w.\-]+)", names)]
            current.append((one[1], one[2], set(re.findall(r"%([\w.\-]+)", rest)) - set(called), called))
    return found


def unordered(text):
    """Pairs of instructions with collectives, at least one of them nested, neither of which needs the other; and how
    many instructions have collectives at all."""
    known = computations(text)

    def sends(opcode, called):
        return opcode in KINDS or (
            opcode in NESTED and any(sends(o, c) for name in called for _, o, _, c in known[name])
        )

    pairs, count = [], 0
    for instructions in known.values():
        needed, before = {}, []
        for name, opcode, operands, called in instructions:
            needs = set().union(operands, *(needed.get(operand, set()) for operand in operands))
            needed[name] = needs
            if not sends(opcode, called):
                continue
            count += 1
            pairs += [(other, name) for other, was in before if (opcode in NESTED or was) and other not in needs]
            before.append((name, opcode in NESTED))
    return pairs, count


def program(config):
    return Program(config, mesh.build(mesh.parse(config.mesh), jax.devices()))


MESHES = {
    "data=8": {},
    "data=4,tensor=2": {"zero": 1},
    "data=2,fsdp=2,tensor=2": {"micro_batch": 1, "zero": 3},
    "fsdp=4,tensor=2": {"sequence_parallel": True},
    "data=2,context=2,tensor=2": {"dropout": 0.1},
    "context=4,fsdp=2": {"recompute": "full"},
    "pipe=2,data=2,tensor=2": {},
    "pipe=2,context=2,tensor=2": {"schedule": "gpipe"},
    "pipe=2,fsdp=2,tensor=2": {"schedule": "zero-bubble"},
    "pipe=2,data=4": {"schedule": "interleaved", "virtual_stages": 2, "zero": 2},
}


@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_train_step_has_its_collectives_in_order(where, model):
    given = dict(MESHES[where])
    model = dataclasses.replace(model, layers=4, dropout=given.pop("dropout", 0.0))
    text = program(run_config(model, mesh=where, global_batch=16, **given)).compiled.as_text()
    pairs, count = unordered(text)
    assert pairs == []
    assert count > 0


@pytest.mark.parametrize("where", ["data=2,context=2,tensor=2", "pipe=2,fsdp=2,tensor=2"])
def test_an_evaluation_has_its_collectives_in_order(where):
    made = program(run_config(LLAMA, mesh=where, global_batch=16))
    batch = {
        n: jax.ShapeDtypeStruct((1, *t.shape[1:]), t.dtype, sharding=t.sharding)
        for n, t in made.batch_targets().items()
    }
    assert unordered(made.evaluate.lower(made.targets()["params"], batch).compile().as_text())[0] == []


def _counted(tied):
    """A sum beside a loop that sends; tied: the loop comes after it."""

    def inside(x, n):
        total = jax.lax.psum(n, "data")
        x = after(total, x) if tied else x
        turned = jax.lax.scan(lambda y, _: (jax.lax.ppermute(y @ y, "data", [(0, 1), (1, 0)]), None), x, None, 3)[0]
        return turned * total

    devices = mesh.build(mesh.parse("data=2"), jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("data")
    function = shard_map(inside, mesh=devices, in_specs=(spec, spec), out_specs=spec)
    where = jax.sharding.NamedSharding(devices, spec)
    arrays = (
        jax.ShapeDtypeStruct(shape, kind, sharding=where) for shape, kind in (((8, 4), "float32"), ((2,), "int32"))
    )
    return jax.jit(function).lower(*arrays).compile().as_text()


def test_a_sum_beside_a_loop_is_found_and_after_orders_it():
    assert len(unordered(_counted(tied=False))[0]) == 1
    assert unordered(_counted(tied=True))[0] == []
