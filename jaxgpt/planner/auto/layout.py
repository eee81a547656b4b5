"""auto_layout: the layout of any function on a mesh, chosen, told, and run.

laid = jaxgpt.auto_layout(loss_and_gradients, weights, batch, mesh=mesh, capacity=2e9)
print(laid)                    # where everything lies, every collective and what it costs
loss, gradients = laid(weights, batch)
"""

import fnmatch
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxgpt.errors import UserError
from jaxgpt.planner.auto.program import Node, trace
from jaxgpt.planner.auto.run import local
from jaxgpt.planner.auto.solve import Box, Choice, Problem, Rates, Solution, solve
from jaxgpt.planner.hardware import find
from jaxgpt.sharding.sbp import P, Place, Signature

Fixed = Mapping[str, Mapping[str, Place]]
RESULT = "result"


def auto_layout(
    f: Callable[..., Any],
    *example: Any,
    mesh: Mesh,
    fixed: Fixed | None = None,
    tied: Mapping[str, str] | None = None,
    capacity: float | int = math.inf,
    price: float | int = 0,
    hardware: str | Rates = "h100",
    limit: float | int = 60,
) -> "Laid":
    """The best layout of f on a mesh: of its arguments, its results, and every value between them.

    example: arguments, or shapes and types (jax.ShapeDtypeStruct); f says no layout itself. fixed: name -> mesh axis ->
    place, for what is not to be chosen; an axis that is not named stays open. Names are "x" and "weights.up", the
    parameters of f with the keys inside of them, "result" and "result.0" for what it returns; patterns ("weights.*")
    stand for all that they match, and a name for all that is inside. tied: name of a result -> name of an argument
    whose layout it must have, such as gradients and weights. capacity: most bytes of arguments on one device. price:
    seconds that one byte of them is worth. hardware: a name of hardware.toml or a file like it, or its rates.
    limit: seconds after which the solver gives the best that it has found, for each time that it is asked.

    Raises UserError for a name that nothing has, a place that cannot be, and where no layout is left.
    """
    names = _names(_parameters(f, len(example)), tuple(example))
    program, shapes = trace(f, example, names)
    results = _names((RESULT,), (shapes,))
    every = [*(node.outputs[0].name for node in program.arguments), *results]
    named = dict(zip(every, [*program.arguments, *program.results], strict=True))
    if len(named) < len(every):
        raise UserError("auto_layout: a parameter of the function may not be called result; give it another name")
    sizes = dict(mesh.shape)
    problem = Problem(
        program=program,
        sizes=sizes,
        rates=_rates(hardware, example),
        capacity=capacity,
        price=price,
        limit=limit,
        allowed=_allowed(_matched(fixed or {}, named, sizes)),
        tied=_pairs(tied or {}, named),
    )
    return Laid(f, mesh, problem, solve(problem), jax.tree.structure(tuple(example)), jax.tree.structure(shapes), named)


def _rates(hardware: str | Rates, example: Any) -> Rates:
    """At the peak of 16-bit products where an argument has such a type."""
    if isinstance(hardware, Rates):
        return hardware
    half = any(jnp.result_type(leaf) in (jnp.bfloat16, jnp.float16) for leaf in jax.tree.leaves(example))
    return Rates.of(find(hardware), "bf16" if half else "fp32")


@dataclass(frozen=True)
class Laid:
    """A function with its layout."""

    function: Callable[..., Any]
    mesh: Mesh
    problem: Problem
    solution: Solution
    arguments_tree: Any
    results_tree: Any
    named: Mapping[str, Node]

    def __call__(self, *arguments: Any) -> Any:
        """The function's results, each where its layout says; arguments are moved where they are to lie."""
        return self.compiled_call(*jax.device_put(arguments, self.shardings))

    @cached_property
    def compiled_call(self) -> Any:
        """The jitted function, for arguments that lie as shardings say."""
        arguments, results = self._signatures("argument"), self._signatures("result")
        run = local(self.problem.program, self.solution, self.problem.sizes)
        layouts = [NamedSharding(self.mesh, s.spec()) for s in arguments[self.arguments_tree.num_leaves :]]
        constants = jax.device_put(self.problem.program.constants, layouts)
        inside = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=tuple(signature.spec() for signature in arguments),
            out_specs=tuple(signature.spec() for signature in results),
            check_vma=False,  # P values differ from device to device, and no type says so
        )

        def call(*given: Any) -> Any:
            return jax.tree.unflatten(self.results_tree, inside(*jax.tree.leaves(given), *constants))

        return jax.jit(call, in_shardings=self.shardings)

    @property
    def shardings(self) -> Any:
        """Where the arguments are to lie: a tuple of trees of NamedShardings."""
        count = self.arguments_tree.num_leaves
        found = [NamedSharding(self.mesh, s.spec()) for s in self._signatures("argument")[:count]]
        return jax.tree.unflatten(self.arguments_tree, found)

    @property
    def layouts(self) -> dict[str, Signature]:
        """Name of each argument and result -> its signature."""
        return {name: self._of(node) for name, node in self.named.items()}

    @property
    def boxes(self) -> list[Box]:
        """Every change of signature that communicates, in the order of the program."""
        values = [value for node in self.problem.program.nodes() for value in node.outputs]
        return [box for value in values for box in self.solution.boxes.get(value, ())]

    @property
    def received(self) -> int:
        """Bytes that one device receives in a call, by the ring algorithms."""
        inside = (node.times * self.problem.inside(node, choice)[0] for node, choice in self.solution.chosen.items())
        return math.ceil(sum(box.value.times * box.received for box in self.boxes) + sum(inside))

    @property
    def seconds(self) -> float:
        """What the integer program minimized: a call's time on one device, with the price of its arguments."""
        return self.solution.seconds

    @property
    def argument_bytes(self) -> int:
        """Bytes of arguments on one device."""
        arguments = self.problem.program.arguments
        return sum(self.problem.held(node.outputs[0], self._of(node)) for node in arguments)

    @property
    def unknown(self) -> list[str]:
        """Primitives without a rule, which every device computes whole."""
        nodes = self.problem.program.nodes()
        return sorted({node.name for node in nodes if not node.known})

    def __str__(self) -> str:
        width = max(map(len, self.named))
        lines = [f"{name:{width}}  {signature}" for name, signature in self.layouts.items()]
        for box in self.boxes:
            times = f" x {box.value.times}" if box.value.times > 1 else ""
            how = " + ".join(box.kinds)
            shape = f"{box.value.name} {list(box.value.shape)}"
            lines.append(f"{shape}: {box.source} -> {box.target}, {how}, {float(box.received):.0f} B{times}")
        for node, choice in self.solution.chosen.items():
            received, count = self.problem.inside(node, choice)
            if count:
                lines.append(f"{node.name}: all-reduce inside, {float(received):.0f} B x {node.times}")
        lines.append(f"{self.received} B received by a device, {self.argument_bytes} B of arguments on it")
        proved = "the least of all layouts" if self.solution.exact else "not proved to be the least"
        lines.append(f"{self.seconds:.3g} s a call, {proved}")
        if self.unknown:
            lines.append(f"computed whole on every device, having no rule: {', '.join(self.unknown)}")
        return "\n".join(lines)

    def _of(self, node: Node) -> Signature:
        return _signature(node, self.solution.chosen[node])

    def _signatures(self, kind: str) -> list[Signature]:
        program = self.problem.program
        return [self._of(node) for node in (program.arguments if kind == "argument" else program.results)]


def _signature(node: Node, choice: Choice) -> Signature:
    return (choice.outputs or choice.inputs)[0]


# Names


def _parameters(f: Callable[..., Any], count: int) -> list[str]:
    """The names of f's first parameters; numbers where it has none."""
    try:
        found = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # of some callables Python cannot tell
        found = []
    plain = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*plain[:count], *(str(i) for i in range(len(plain[:count]), count))]


def _names(roots: Any, trees: tuple[Any, ...]) -> list[str]:
    """ "weights.up" for every array of the trees."""
    found = []
    for root, tree in zip(roots, trees, strict=True):
        for keys, _ in jax.tree_util.tree_leaves_with_path(tree):
            inside = jax.tree_util.keystr(keys, simple=True, separator=".")
            found.append(f"{root}.{inside}" if inside else root)
    return found


def _inside(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def _matched(fixed: Fixed, named: Mapping[str, Node], sizes: Mapping[str, int]) -> dict[Node, dict[str, Place]]:
    """Node -> what is fixed for it; a later entry wins."""
    found: dict[Node, dict[str, Place]] = {}
    for pattern, places in fixed.items():
        nodes = [node for name, node in named.items() if _inside(name, pattern)]
        if not nodes:
            raise UserError(f"auto_layout fixed {pattern!r}: nothing has that name; there are {', '.join(named)}")
        for axis, place in places.items():
            if axis not in sizes:
                raise UserError(f"auto_layout fixed {pattern!r}: axis {axis!r} is not in the mesh, {', '.join(sizes)}")
            if place is P:
                raise UserError(f"auto_layout fixed {pattern!r}: P is for values inside; give S(dimension) or B")
        for node in nodes:
            found.setdefault(node, {}).update(places)
    return found


def _allowed(fixed: Mapping[Node, Mapping[str, Place]]) -> Callable[[Node, Choice], bool]:
    def allowed(node: Node, choice: Choice) -> bool:
        wanted = fixed.get(node, {})
        signature = _signature(node, choice) if wanted else Signature()
        return all(signature[axis] == place for axis, place in wanted.items() if axis in choice.rules)

    return allowed


def _pairs(tied: Mapping[str, str], named: Mapping[str, Node]) -> list[tuple[Node, Node]]:
    """(argument, result) for every array inside of the names that are tied."""
    found = []
    for result, argument in tied.items():
        inside = {
            n.removeprefix(result): node for n, node in named.items() if n == result or n.startswith(f"{result}.")
        }
        for rest, node in inside.items():
            if argument + rest not in named:
                there = ", ".join(named)
                raise UserError(f"auto_layout tied {result!r}: {argument}{rest} is no argument; there are {there}")
            found.append((named[argument + rest], node))
        if not inside:
            raise UserError(f"auto_layout tied {result!r}: no result has that name; there are {', '.join(named)}")
    return found
