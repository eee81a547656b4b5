"""What operators make of SBP signatures: rules for one mesh axis, applied axis by axis.

An operator is written in named dimensions, "x: rows inner, w: inner columns -> rows columns", and its rules follow:

- all inputs B: the output is B;
- a dimension split in every input that has it: the output is split along it, or P where the operator sums over it;
- P in one input of a product, or in all inputs of a sum: the output is P, since the operator is linear in them.

A rule says: where every device runs the operator on its own tensors, its results have the output's signature. What
none of the rules says needs boxing first. Gradients are dual: that of a B input is P, of a P input B, of S(i) S(i).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxgpt.errors import UserError
from jaxgpt.sharding.sbp import B, P, Place, S, Signature

Dims = tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """On one axis: places of the inputs -> place of the output."""

    inputs: tuple[Place, ...]
    output: Place
    inside: tuple[str, ...] = ()
    """All-reduces over the axis that the operator makes inside, of the output's size without the split dimension."""

    def __str__(self) -> str:
        inside = f" after all-reduce of {' and '.join(self.inside)}" if self.inside else ""
        return f"({', '.join(map(str, self.inputs))}) -> {self.output}{inside}"


@dataclass(frozen=True)
class Operator:
    """An operator's tensors in named dimensions, and its table of rules."""

    name: str
    inputs: Mapping[str, Dims]
    output: Dims
    rules: tuple[Rule, ...] = field(repr=False)

    def rule(self, axis: str, places: tuple[Place, ...]) -> Rule:
        """The rule for inputs that have these places on an axis. Raises UserError where there is none."""
        for rule in self.rules:
            if rule.inputs == places:
                return rule
        given = ", ".join(self._said(name, place) for name, place in zip(self.inputs, places, strict=True))
        near = "; or ".join(self._change(rule, places) for rule in self._nearest(places))
        raise UserError(f"{self.name} on axis {axis}: no rule for {given}; change by to_sbp {near}")

    def _said(self, tensor: str, place: Place) -> str:
        dims = self.inputs[tensor]
        if isinstance(place, S) and not 0 <= place.dim < len(dims):
            raise UserError(f"{self.name}: {tensor} [{', '.join(dims)}] has no dimension {place.dim} to split")
        return f"{tensor} {place}" + (f" ({dims[place.dim]})" if isinstance(place, S) else "")

    def _nearest(self, places: tuple[Place, ...]) -> list[Rule]:
        changes = [sum(a != b for a, b in zip(rule.inputs, places, strict=True)) for rule in self.rules]
        return [rule for rule, count in zip(self.rules, changes, strict=True) if count == min(changes)]

    def _change(self, rule: Rule, places: tuple[Place, ...]) -> str:
        changed = [self._said(n, b) for n, a, b in zip(self.inputs, places, rule.inputs, strict=True) if a != b]
        return f"{' and '.join(changed)}, for {rule.output}"


def operator(
    name: str,
    formula: str,
    *,
    summed: str = "",
    whole: str = "",
    linear: Sequence[str] = (),
    inside: Mapping[str, tuple[str, ...]] | None = None,
) -> Operator:
    """An operator of "x: rows inner, w: inner columns -> rows columns".

    summed: dimensions, absent from the output, that it sums over. whole: dimensions that it must have whole. linear:
    each entry names the inputs in which it is jointly linear, "x y" for x + y; "x" and "w" apart for a product.
    inside: dimension -> the all-reduces that it makes inside when that is split.
    """
    left, right = formula.split("->")
    inputs = {n.strip(): tuple(dims.split()) for n, dims in (part.split(":") for part in left.split(","))}
    output, inside = tuple(right.split()), inside or {}
    if any(len(set(dims)) < len(dims) for dims in (output, *inputs.values())):
        raise ValueError(f"{name}: a dimension stands twice in one tensor, so that one cannot split it")
    rules = [Rule((B,) * len(inputs), B)]
    for dim in dict.fromkeys(d for dims in inputs.values() for d in dims):
        if dim in whole.split():
            continue
        if dim not in output and dim not in summed.split():
            raise ValueError(f"{name}: {dim} is neither in the output, nor summed, nor whole")
        places = tuple(S(dims.index(dim)) if dim in dims else B for dims in inputs.values())
        rules.append(Rule(places, S(output.index(dim)) if dim in output else P, inside.get(dim, ())))
    rules += [Rule(tuple(P if n in group.split() else B for n in inputs), P) for group in linear]
    return Operator(name, inputs, output, tuple(rules))


def einsum(formula: str) -> Operator:
    """jnp.einsum's operator, "BSE,EM->BSM"; its operands are called x, w, v and u in turn."""
    left, right = re.sub(r"\s", "", formula).split("->")
    operands = dict(zip("xwvu"[: left.count(",") + 1], left.split(","), strict=True))
    tensors = ", ".join(f"{name}: {' '.join(dims)}" for name, dims in operands.items())
    if new := set(right) - set(left):
        raise ValueError(f"einsum {formula}: no input has the output's {', '.join(sorted(new))}")
    gone = " ".join(sorted(set(left) - set(right) - {","}))
    return operator(f"einsum {formula}", f"{tensors} -> {' '.join(right)}", summed=gone, linear=tuple(operands))


MATMUL = operator("matmul", "x: rows inner, w: inner columns -> rows columns", summed="inner", linear=("x", "w"))

EMBEDDING = operator(
    "embedding",
    "tokens: batch seq, table: vocab embed -> batch seq embed",
    summed="vocab",  # each device looks up what is in its rows, and zeros for the rest
    linear=("table",),
)

ATTENTION = operator(
    "attention",
    "q: batch seq heads head, k: batch keys heads head, v: batch keys heads width -> batch seq heads width",
    whole="keys head",
    linear=("v",),
)
"""Softmax attention; with seq split, each device masks by its true positions."""

SUM = operator("sum", "x: rows columns -> rows", summed="columns", linear=("x",))
MEAN = operator("mean", "x: rows columns -> rows", summed="columns", linear=("x",))
"""Each device divides by the logical count."""
MAX = operator("max", "x: rows columns -> rows", whole="columns")

NEGATE = operator("negate", "x: rows columns -> rows columns", linear=("x",))
"""And all that is linear in one input: scaling by a constant, a cast to a wider type."""
GELU = operator("gelu", "x: rows columns -> rows columns")
"""And all that is applied to each element and is not linear."""
ADD = operator("add", "x: rows columns, y: rows columns -> rows columns", linear=("x y",))
MULTIPLY = operator("multiply", "x: rows columns, y: rows columns -> rows columns", linear=("x", "y"))
BIAS = operator("bias", "x: rows columns, bias: columns -> rows columns", linear=("x bias",))
NORM = operator("norm", "x: rows embed, scale: embed -> rows embed", whole="embed", linear=("scale",))

SOFTMAX = operator("softmax", "x: rows entries -> rows entries", inside={"entries": ("max", "sum")})
CROSS_ENTROPY = operator(
    "cross_entropy",
    "logits: rows vocab, targets: rows -> rows",
    summed="vocab",  # the device that holds a target's logit gives its loss, the others zero
    inside={"vocab": ("max", "sum")},
)


def infer(op: Operator, *inputs: Mapping[str, Place]) -> Signature:
    """The output's signature on all axes.

    Raises UserError naming operator, tensor, dimension and axis where an axis has no rule, with the changes that would
    give it one, or where tensors split one dimension over the same axes in different orders.
    """
    signatures = dict(zip(op.inputs, map(Signature, inputs), strict=True))
    axes = tuple(dict.fromkeys(axis for signature in signatures.values() for axis in signature))
    outputs = {axis: op.rule(axis, tuple(s[axis] for s in signatures.values())).output for axis in axes}
    ordered: dict[str, Place] = {}
    for dim, split in _orders(op, signatures).items():
        ordered |= {axis: S(op.output.index(dim)) for axis in split if dim in op.output}
    return Signature(ordered | {axis: place for axis, place in outputs.items() if axis not in ordered}, axes)


def _orders(op: Operator, signatures: Mapping[str, Signature]) -> dict[str, tuple[str, ...]]:
    """Dimension -> the axes that split it, outermost first, the same in every tensor."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, dims in op.inputs.items():
        for position, dim in enumerate(dims):
            split = signatures[name].split(position)
            first, expected = found.setdefault(dim, (name, split))
            if split != expected:
                said = f"{first} is split along it over {' then '.join(expected)}, {name} over {' then '.join(split)}"
                raise UserError(f"{op.name}: dimension {dim}: {said}; give both the same order")
    return {dim: split for dim, (_, split) in found.items()}


def dual(place: Place) -> Place:
    """Of a gradient: P for B, B for P, S(i) for S(i)."""
    return place if isinstance(place, S) else P if place is B else B


def gradients(op: Operator, *inputs: Mapping[str, Place]) -> tuple[Signature, ...]:
    """The signatures in which the gradients of the inputs come out, where that of the output has its dual.

    Raises UserError where the inputs have none of op's rules.
    """
    axes = infer(op, *inputs).axes
    given = map(Signature, inputs)
    return tuple(Signature({a: dual(s[a]) for a in dict.fromkeys((*s, *axes))}, axes) for s in given)
