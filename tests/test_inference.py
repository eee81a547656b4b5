"""The operators' rules of SBP, proved from the definition of S, B and P, and inference by them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import definition
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.sharding import inference
from jaxgpt.sharding.inference import Operator, Rule, dual, einsum, gradients, infer
from jaxgpt.sharding.sbp import B, P, Place, S, Signature

pytestmark = pytest.mark.core

# Operators, and what one device does of them


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.einsum("bhst,bthw->bshw", softmax(np.einsum("bshd,bthd->bhst", q, k)), v)


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(targets)), targets]


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) * scale


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@dataclass(frozen=True)
class Case:
    """An operator, and its mathematics on one device."""

    operator: Operator
    function: Callable[..., np.ndarray]
    tokens: int = -1
    """Which input holds whole numbers."""

    @property
    def name(self) -> str:
        return self.operator.name

    def inputs(self, rng: np.random.Generator, unit: int = 6) -> list[np.ndarray]:
        """Every dimension of unit or twice that; no two dimensions of one tensor the same, where it has two."""
        sizes = {dim: unit * (1 + (dim in LONG)) for dims in self.operator.inputs.values() for dim in dims}
        shapes = [tuple(sizes[dim] for dim in dims) for dims in self.operator.inputs.values()]
        found = [rng.normal(size=shape) for shape in shapes]
        if self.tokens >= 0:
            found[self.tokens] = rng.integers(0, unit, shapes[self.tokens])
        return found


LONG = ("inner", "E", "embed", "keys", "width", "columns", "entries")

CASES = [
    Case(inference.MATMUL, np.matmul),
    Case(einsum("BSE,EHD->BSHD"), lambda x, w: np.einsum("BSE,EHD->BSHD", x, w)),
    Case(einsum("BTHD,HDE->BTE"), lambda x, w: np.einsum("BTHD,HDE->BTE", x, w)),
    Case(inference.EMBEDDING, lambda tokens, table: table[tokens], tokens=0),
    Case(inference.ATTENTION, attention),
    Case(inference.SUM, lambda x: x.sum(-1)),
    Case(inference.MEAN, lambda x: x.mean(-1)),
    Case(inference.MAX, lambda x: x.max(-1)),
    Case(inference.NEGATE, np.negative),
    Case(inference.GELU, gelu),
    Case(inference.ADD, np.add),
    Case(inference.MULTIPLY, np.multiply),
    Case(inference.BIAS, np.add),
    Case(inference.NORM, norm),
    Case(inference.SOFTMAX, softmax),
    Case(inference.CROSS_ENTROPY, cross_entropy, tokens=1),
]

Devices = list[tuple[np.ndarray, ...]]
"""What each device of an axis holds of an operator's inputs."""


def owned(numbers: np.ndarray, start: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of the numbers lie in this device's part, and where in it."""
    inside = (numbers >= start) & (numbers < start + size)
    return inside, np.where(inside, numbers - start, 0)


def embedding_of_rows(devices: Devices) -> list[np.ndarray]:
    results = []
    for index, (tokens, table) in enumerate(devices):
        inside, row = owned(tokens, index * len(table), len(table))
        results.append(np.where(inside[..., None], table[row], 0))
    return results


def softmax_of_parts(devices: Devices) -> list[np.ndarray]:
    largest = np.max([x.max(-1, keepdims=True) for (x,) in devices], axis=0)
    exps = [np.exp(x - largest) for (x,) in devices]
    total = sum(e.sum(-1, keepdims=True) for e in exps)
    return [e / total for e in exps]


def cross_entropy_of_parts(devices: Devices) -> list[np.ndarray]:
    largest = np.max([x.max(-1) for x, _ in devices], axis=0)
    total = sum(np.exp(x - largest[:, None]).sum(-1) for x, _ in devices)
    results = []
    for index, (logits, targets) in enumerate(devices):
        inside, column = owned(targets, index * logits.shape[1], logits.shape[1])
        loss = np.log(total) + largest - logits[np.arange(len(targets)), column]
        results.append(np.where(inside, loss, 0))
    return results


def mean_of_parts(devices: Devices) -> list[np.ndarray]:
    return [x.sum(-1) / (x.shape[-1] * len(devices)) for (x,) in devices]


SPECIAL = {
    ("embedding", (B, S(0))): embedding_of_rows,
    ("softmax", (S(1),)): softmax_of_parts,
    ("cross_entropy", (S(1), B)): cross_entropy_of_parts,
    ("mean", (S(1),)): mean_of_parts,
}
"""Where a device must know which part it holds, or talk inside: all devices together. Elsewhere each runs the
operator as it is."""


def on_devices(case: Case, places: tuple[Place, ...], devices: Devices) -> list[np.ndarray]:
    special = SPECIAL.get((case.name, places))
    return special(devices) if special else [case.function(*inputs) for inputs in devices]


def cut_inputs(inputs: list[np.ndarray], places: tuple[Place, ...], p: int, rng: np.random.Generator) -> Devices:
    parts = [definition.cut(x, place, p, rng) for x, place in zip(inputs, places, strict=True)]
    return [tuple(part.copy() for part in device) for device in zip(*parts, strict=True)]


RULES = [(case, rule) for case in CASES for rule in case.operator.rules]
RULE_NAMES = [f"{case.name} {rule}" for case, rule in RULES]


@pytest.mark.parametrize(("case", "rule"), RULES, ids=RULE_NAMES)
def test_every_rule_holds(case: Case, rule: Rule):
    """Devices run the operator on their own tensors; together they hold what one device computes."""
    rng = np.random.default_rng(0)
    inputs = case.inputs(rng)
    results = on_devices(case, rule.inputs, cut_inputs(inputs, rule.inputs, 3, rng))
    np.testing.assert_allclose(definition.join(results, rule.output), case.function(*inputs), rtol=1e-9, atol=1e-9)


def differentiate(loss: Callable[[], float], array: np.ndarray) -> np.ndarray:
    """The gradient of loss in the entries of array, by central differences."""
    gradient = np.zeros_like(array)
    for place in np.ndindex(*array.shape):
        value = array[place]
        array[place] = value + 1e-5
        above = loss()
        array[place] = value - 1e-5
        gradient[place] = (above - loss()) / 2e-5
        array[place] = value
    return gradient


@pytest.mark.parametrize(("case", "rule"), RULES, ids=RULE_NAMES)
def test_gradients_are_dual(case: Case, rule: Rule):
    """The output's gradient is handed out in the dual signature; the inputs' gradients come out in theirs."""
    rng = np.random.default_rng(1)
    inputs = case.inputs(rng, unit=2)
    dy = rng.normal(size=case.function(*inputs).shape)
    devices = cut_inputs(inputs, rule.inputs, 2, rng)
    dys = definition.cut(dy, dual(rule.output), 2, rng)

    def one() -> float:
        return float((case.function(*inputs) * dy).sum())

    def together() -> float:
        results = on_devices(case, rule.inputs, devices)
        return float(sum((y * part).sum() for y, part in zip(results, dys, strict=True)))

    for i in (i for i in range(len(inputs)) if i != case.tokens):
        parts = [differentiate(together, device[i]) for device in devices]
        joined = definition.join(parts, dual(rule.inputs[i]))
        np.testing.assert_allclose(joined, differentiate(one, inputs[i]), rtol=1e-5, atol=1e-5)


def holds(case: Case, places: tuple[Place, ...], output: Place, p: int) -> bool:
    """Whether the devices, running the operator as it is, hold its result in that signature."""
    rng = np.random.default_rng(p)
    inputs = case.inputs(rng)
    expected = case.function(*inputs)
    try:
        results = [case.function(*device) for device in cut_inputs(inputs, places, p, rng)]
        joined = definition.join(results, output)
    except (ValueError, AssertionError):  # shapes that do not fit, copies that differ
        return False
    return joined.shape == expected.shape and np.allclose(joined, expected, rtol=1e-9, atol=1e-9)


PLAIN = ("matmul", "sum", "max", "negate", "gelu", "add", "multiply", "bias", "norm", "attention")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in PLAIN], ids=lambda case: case.name)
def test_no_rule_is_missing(case: Case):
    """All combinations of places are tried: those that hold are the table's, and no others."""
    tried = [[*(S(dim) for dim in range(len(dims))), B, P] for dims in case.operator.inputs.values()]
    outputs = [*(S(dim) for dim in range(len(case.operator.output))), B, P]
    found = {
        (places, output)
        for places in itertools.product(*tried)
        for output in outputs
        if all(holds(case, places, output, p) for p in (2, 3))
    }
    assert found == {(rule.inputs, rule.output) for rule in case.operator.rules}


# Inference over several axes


def test_matmul_infers_axis_by_axis():
    x, w = Signature({"data": B, "tensor": S(0)}), Signature({"data": S(1), "tensor": B})
    assert infer(inference.MATMUL, x, w) == Signature({"data": S(1), "tensor": S(0)})
    column = infer(einsum("BSE,EM->BSM"), {"data": S(0)}, {"tensor": S(1)})
    assert str(column) == "[data: S(0), tensor: S(2)]"
    row = infer(einsum("BSM,ME->BSE"), column, {"tensor": S(0)})
    assert str(row) == "[data: S(0), tensor: P]"


@pytest.mark.parametrize("orders", list(itertools.product((("a", "b"), ("b", "a")), repeat=2)), ids=str)
def test_two_axes_by_the_definition(orders):
    """Every pair of one-axis rules of the matrix product on a mesh of 2 x 3, axes named in either order. Only the
    contracted dimension stands in both tensors, so that only there the orders must agree."""
    case, sizes, rng = CASES[0], {"a": 2, "b": 3}, np.random.default_rng(0)
    x, w = case.inputs(rng)
    for first, second in itertools.product(case.operator.rules, repeat=2):
        on = {"a": first, "b": second}
        signatures = [Signature({axis: on[axis].inputs[i] for axis in orders[i]}) for i in (0, 1)]
        if orders[0] != orders[1] and first.inputs == second.inputs == (S(1), S(0)):
            with pytest.raises(UserError, match="give both the same order"):
                infer(case.operator, *signatures)
            continue
        output = infer(case.operator, *signatures)
        held = [definition.cut_all(t, s, sizes, rng) for t, s in zip((x, w), signatures, strict=True)]
        local = {place: np.matmul(held[0][place], held[1][place]) for place in held[0]}
        np.testing.assert_allclose(definition.join_all(local, output, sizes), x @ w, rtol=1e-9, atol=1e-9)


def test_the_order_of_cutting_is_kept_and_must_agree():
    x = Signature({"b": S(1), "a": S(1), "c": S(0)})
    with pytest.raises(UserError) as caught:
        infer(inference.MATMUL, x, {"a": S(0), "b": S(0)})
    assert str(caught.value) == (
        "matmul: dimension inner: x is split along it over b then a, w over a then b; give both the same order"
    )
    assert infer(inference.NEGATE, x) == x
    assert infer(inference.MATMUL, x, {"b": S(0), "a": S(0)}) == Signature({"c": S(0), "a": P, "b": P})


@pytest.mark.parametrize(
    ("operator", "inputs", "message"),
    [
        (
            inference.MATMUL,
            ({"tensor": S(1)}, {}),
            "matmul on axis tensor: no rule for x S(1) (inner), w B; change by to_sbp x B, for B; "
            "or x S(0) (rows), for S(0); or w S(0) (inner), for P; or x P, for P",
        ),
        (inference.GELU, ({"tensor": P},), "gelu on axis tensor: no rule for x P; change by to_sbp x B, for B; or"),
        (inference.ADD, ({"data": S(0), "tensor": P}, {"data": S(0)}), "add on axis tensor: no rule for x P, y B;"),
        (inference.MAX, ({"tensor": S(1)},), "max on axis tensor: no rule for x S(1) (columns);"),
        (inference.ATTENTION, ({}, {"context": S(1)}, {"context": S(1)}), "k S(1) (keys), v S(1) (keys)"),
        (inference.MATMUL, ({"tensor": S(2)}, {}), "matmul: x [rows, inner] has no dimension 2 to split"),
        (inference.MATMUL, ({"tensor": P}, {"tensor": P}), "no rule for x P, w P; change by to_sbp"),
    ],
    ids=lambda value: value.name if isinstance(value, Operator) else "",
)
def test_what_has_no_rule_is_refused_with_what_would_have_one(operator, inputs, message):
    with pytest.raises(UserError) as caught:
        infer(operator, *inputs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gradients_of_a_feed_forward_layer():
    """Megatron's column and row split: the gradient of what was whole is partial, and reduced once."""
    x, up, down = {"data": S(0)}, {"tensor": S(1)}, {"tensor": S(0)}
    column, row = einsum("BSE,EM->BSM"), einsum("BSM,ME->BSE")
    h = infer(column, x, up)
    assert gradients(column, x, up) == (Signature({"data": S(0), "tensor": P}), Signature({"data": P, "tensor": S(1)}))
    assert gradients(row, h, down) == (h, Signature({"data": P, "tensor": S(0)}))
    with pytest.raises(UserError):
        gradients(row, h, {})


def test_the_tables_can_be_read():
    assert [str(rule) for rule in inference.MATMUL.rules] == [
        "(B, B) -> B",
        "(S(0), B) -> S(0)",
        "(S(1), S(0)) -> P",
        "(B, S(1)) -> S(1)",
        "(P, B) -> P",
        "(B, P) -> P",
    ]
    assert "(S(1), B) -> P after all-reduce of max and sum" in map(str, inference.CROSS_ENTROPY.rules)


def test_formulas_that_have_no_table():
    with pytest.raises(ValueError, match="stands twice in one tensor"):
        einsum("ii->i")
    with pytest.raises(ValueError, match="no input has the output's M"):
        einsum("BE,EN->BM")
    with pytest.raises(ValueError, match="zip"):
        einsum("ab,bc,cd,de,ef->af")


def test_an_operator_says_what_becomes_of_every_dimension():
    with pytest.raises(ValueError, match="columns is neither in the output, nor summed, nor whole"):
        inference.operator("median", "x: rows columns -> rows")
