"""Matrix products of a compiled program's text, with how often each runs: its arithmetic, as XLA left it."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxgpt.sharding.hlo import Instruction, Module

CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
OPERANDS = re.compile(r"%?([\w.\-]+)")
SHAPE = re.compile(r"\w+\[([\d,]*)\]")


@dataclass(frozen=True)
class Product:
    """One `dot`."""

    flops: int
    """Of one run: two for each multiplication."""
    times: int
    """How often it runs: loops by their trips, conditionals by jaxprs.share."""
    exact: bool
    """False where times is only known for the case that a branch is always taken."""


def products(text: str) -> list[Product]:
    """Every `dot` of an HLO module's text, those inside of fusions too. Those that a library's call stands for (cuBLAS,
    cuDNN) are not seen: text compiled for CPUs has none."""
    module = Module(text)
    return [
        Product(_flops(module.computations[computation], instruction), times, exact)
        for computation, instruction, times, exact in module.instructions()
        if instruction.opcode == "dot"
    ]


def flops(text: str) -> int:
    """All products of a step. Raises ValueError where it is not known how often one runs."""
    found = products(text)
    if not all(product.exact for product in found):
        raise ValueError("a product runs in a loop of unknown length, or in a branch taken nobody knows how often")
    return sum(product.flops * product.times for product in found)


def _flops(computation: list[Instruction], dot: Instruction) -> int:
    contracted = CONTRACTED.search(dot.rest)
    if contracted is None:
        raise ValueError(f"a dot without contracted dimensions: {dot.rest[:200]}")
    left = _shape(next(_operand_types(computation, dot)))
    return 2 * math.prod(_shape(dot.type)) * math.prod(left[int(d)] for d in contracted[1].split(",") if d)


def _operand_types(computation: list[Instruction], instruction: Instruction) -> Iterator[str]:
    """Types of the operands in order: written before their names, or those of the instructions of these names."""
    types = {each.name: each.type for each in computation}
    for operand in instruction.rest.split(")")[0].split(", %"):
        written = operand.strip().split(" ")
        yield written[0] if len(written) > 1 else types[written[0].lstrip("%")]


def _shape(text: str) -> tuple[int, ...]:
    found = SHAPE.search(text)
    if found is None:
        raise ValueError(f"not the type of an array: {text[:100]}")
    return tuple(int(n) for n in found[1].split(",") if n)
