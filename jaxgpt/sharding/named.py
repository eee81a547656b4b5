"""Named dimensions for mathematics: the model says which dimensions come out, the active layout says where they lie.

The step is manual over every mesh axis but `tensor`, which stays in the types (AxisType.Explicit). So the model names
dimensions ("batch seq embed"), and only here a name becomes a mesh axis. Without an active layout everything is plain
single-device JAX.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

TENSOR = "tensor"


class Sequence(NamedTuple):
    """A sequence split over a manual axis."""

    axis: str
    parts: int
    form: str
    """How attention meets the other parts: "ring" or "gather"."""


_rules: ContextVar[Mapping[str, str | None] | None] = ContextVar("rules", default=None)
_shared: ContextVar[Mapping[str, str] | None] = ContextVar("shared", default=None)
_sequence: ContextVar["Sequence | None"] = ContextVar("sequence", default=None)
_widened: ContextVar[bool] = ContextVar("widened", default=True)


@contextlib.contextmanager
def layout(
    rules: Mapping[str, str | None],
    sequence: "Sequence | None" = None,
    shared: Mapping[str, str] | None = None,
    widened: bool = True,
) -> Iterator[None]:
    """Within it, dimension names lie on the axes that rules gives (None: not split), and the sequence as said.

    shared: dimension names that lie split over a manual axis as well, as the outer part of their split.
    widened: whether operands of a product with a wider result are made as wide first: GPUs take them as they are, XLA
    on CPU does not.
    """
    values: tuple[tuple[ContextVar[Any], Any], ...] = (
        (_rules, rules),
        (_sequence, sequence),
        (_shared, shared),
        (_widened, widened),
    )
    tokens = [(variable, variable.set(value)) for variable, value in values]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def sequence_axis() -> "Sequence | None":
    """How the sequence lies split over a manual axis; None where every device has all of it."""
    return _sequence.get()


def spec(dims: str) -> PartitionSpec | None:
    """The PartitionSpec of "batch seq embed" over the typed axes; None without an active layout.

    Raises KeyError for a name that the layout does not know: a dimension is never left unsplit by a misspelling.
    """
    rules = _rules.get()
    if rules is None:
        return None
    if strange := [name for name in dims.split() if name not in rules]:
        raise KeyError(f"{dims!r}: no layout names {', '.join(strange)}; there are {', '.join(rules)}")
    return PartitionSpec(*(rules[name] for name in dims.split()))


def _spec_for(dims: str, count: int, *made_of: jax.Array) -> PartitionSpec | None:
    """spec of a tensor of so many dimensions. Raises ValueError: what is not named would else be left unsplit."""
    if (named := len(dims.split())) != count:
        of = " and ".join(str(jax.typeof(each)) for each in made_of)
        raise ValueError(f"layout of what is made of {of}: {dims!r} names {named} dimensions of {count}")
    return spec(dims)


def has_layout() -> bool:
    """Whether a layout is active, and with it a mesh."""
    return _rules.get() is not None


def _splits() -> bool:
    return TENSOR in (_rules.get() or {}).values()


def _spec_of(x: jax.Array) -> PartitionSpec | None:
    return None if _rules.get() is None else jax.typeof(x).sharding.spec


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None, out: str) -> jax.Array:
    """The product of activations x [B, S, inputs...] and a weight [inputs..., outputs...], plus a bias [outputs...]:
    [B, S, outputs...] in x's type, with the named dimensions out, laid out as the layout says.

    A weight in fp32 is rounded to x's type for the products, and its gradient is not: each device and microbatch has
    another part of the sum, so that a gradient rounded before it is added up would differ from mesh to mesh.

    Which collective that takes follows from the layouts, forward and backward. A contraction over split dimensions is
    an all-reduce (Megatron's row split); or, where the residual stream's sequence lies split over the same axis, a
    reduce-scatter, and then x is gathered before it meets a weight (arXiv 2205.05198): forward, and again for the
    weight's gradient, so that only the split x is kept. The bias' gradient is summed where dy is whole: that sends
    nothing. The derivative is written here so that what it keeps are the operands themselves and nothing is held twice,
    and for the form of the products: dimensions are contracted in the order in which they lie, else XLA on CPU copies
    operands transposed.
    """
    contracted = (tuple(range(2, x.ndim)), tuple(range(x.ndim - 2)))
    lies = _spec_for(out, 4 + weight.ndim - x.ndim, x, weight)
    y = lax.dot_general(_whole_sequence(x), weight.astype(x.dtype), (contracted, ((), ())), out_sharding=lies)
    return y if bias is None else y + bias.astype(y.dtype)


def _whole_sequence(x: jax.Array) -> jax.Array:
    """x with its first two dimensions, batch and sequence, split over no typed axis: at most one all-gather."""
    found = _spec_of(x)
    if found is None or (found[0] is None and found[1] is None):
        return x
    return jax.reshard(x, PartitionSpec(None, None, *found[2:]))


Operands = tuple[jax.Array, jax.Array, jax.Array | None]


def _linear_forward(x: jax.Array, weight: jax.Array, bias: jax.Array | None, out: str) -> tuple[jax.Array, Operands]:
    return linear(x, weight, bias, out), (x, weight, bias)


def _linear_backward(out: str, kept: Operands, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    (x, weight, bias), dy = kept, _whole_sequence(dy)
    contracted = (tuple(range(2, dy.ndim)), tuple(range(x.ndim - 2, weight.ndim)))
    dx = lax.dot_general(dy, weight.astype(dy.dtype), (contracted, ((), ())), out_sharding=_spec_of(x))
    return dx, _weight_gradient(_whole_sequence(x), dy, weight), None if bias is None else _bias_gradient(dy, bias)


def _bias_gradient(dy: jax.Array, bias: jax.Array) -> jax.Array:
    """Sum over batch and sequence, in fp32: a bf16 sum stands still once it is 256 times what is added to it. Merged as
    for a weight's gradient, so that XLA on CPU makes dy once."""
    if _splits():
        return jnp.sum(dy.astype(jnp.float32), (0, 1)).astype(bias.dtype)
    flat = dy.reshape(dy.shape[0] * dy.shape[1], -1)
    return jnp.sum(flat.astype(jnp.float32), 0).reshape(bias.shape).astype(bias.dtype)


def _weight_gradient(x: jax.Array, dy: jax.Array, weight: jax.Array) -> jax.Array:
    """Sum over batch and sequence of the outer products of x and dy, in the weight's type.

    Batch and sequence are merged into one dimension first: contracted as two, XLA on CPU copies x transposed and
    computes whatever made x again, with strided reads, inside of that copy. Where nothing is split, the others are
    merged too, and the longer one comes second, for the same reason.
    """
    if _widened.get():
        x, dy = x.astype(weight.dtype), dy.astype(weight.dtype)
    tokens = x.shape[0] * x.shape[1]
    product = functools.partial(
        lax.dot_general, dimension_numbers=(((0,), (0,)), ((), ())), preferred_element_type=weight.dtype
    )
    if _splits():
        flat_x, flat_dy = (a.reshape(tokens, *a.shape[2:]) for a in (x, dy))
        return product(flat_x, flat_dy, out_sharding=_spec_of(weight))
    flat_x, flat_dy = x.reshape(tokens, -1), dy.reshape(tokens, -1)
    if flat_x.shape[1] <= flat_dy.shape[1]:
        return product(flat_x, flat_dy).reshape(weight.shape)
    return lax.optimization_barrier(product(flat_dy, flat_x)).T.reshape(weight.shape)


linear.defvjp(_linear_forward, _linear_backward)


def local(function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> Callable[..., Any]:
    """function on each device's part of a dimension split over `tensor`, communication over `tensor` written out.

    inputs and outputs are trees of dimension names. Where nothing is split over `tensor`: function itself, on whole
    arrays, in which psum_tensor and its like do nothing.
    """
    return nested(function, inputs, outputs) if _splits() else function


def nested(function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> Callable[..., Any]:
    """function in a shard_map over `tensor` even where that has one device: what reduce-scatters over a manual axis
    needs it, since JAX refuses the transpose's type while a typed axis remains."""
    specs = functools.partial(jax.tree.map, spec)
    return jax.shard_map(function, in_specs=specs(inputs), out_specs=specs(outputs), axis_names={TENSOR})


def splits(dim: str) -> bool:
    """Whether the named dimension lies split over `tensor`."""
    return (_rules.get() or {}).get(dim) == TENSOR


def _outer(dim: str) -> str | None:
    return (_shared.get() or {}).get(dim)


def _axes_of(dim: str) -> tuple[str, ...]:
    """The axes over which the named dimension lies split, from the outermost, inside a function given to local."""
    outer = _outer(dim)
    return (*((outer,) if outer else ()), *((TENSOR,) if splits(dim) else ()))


def psum_over(dim: str, x: jax.Array) -> jax.Array:
    """Sum over the parts of the named dimension, inside a function given to local."""
    axes = _axes_of(dim)
    return lax.psum(x, axes) if axes else x


def pmax_over(dim: str, x: jax.Array) -> jax.Array:
    """Largest over the parts of the named dimension, inside a function given to local."""
    axes = _axes_of(dim)
    return lax.pmax(x, axes) if axes else x


def part_of(dim: str) -> jax.Array | int:
    """Which part of the named dimension this device has, inside a function given to local."""
    axes = _axes_of(dim)
    return lax.axis_index(axes) if axes else 0


def sum_into(dim: str, x: jax.Array, dims: str) -> jax.Array:
    """The sum over the parts of dimension dim of whole x, laid out as its named dimensions dims say; inside local.

    P -> S or P -> B; where dim is not split, x is the sum already: B -> S or nothing.
    """
    at, outer = _split_dim(dims), _outer(dim)
    if at is None:
        return psum_over(dim, x)
    if splits(dim):
        x = lax.psum_scatter(x, TENSOR, scatter_dimension=at, tiled=True)
    else:
        size = x.shape[at] // lax.axis_size(TENSOR)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(TENSOR) * size, size, at)
    return lax.psum(x, outer) if outer else x


def _split_dim(dims: str) -> int | None:
    found = spec(dims)
    return None if found is None or TENSOR not in found else tuple(found).index(TENSOR)


def relayout(x: jax.Array, dims: str) -> jax.Array:
    """x with its named dimensions laid out as the layout says: boxing, or nothing where they already lie so."""
    wanted = _spec_for(dims, x.ndim, x)
    return x if wanted is None or jax.typeof(x).sharding.spec == wanted else jax.reshard(x, wanted)


def reshape(x: jax.Array, shape: tuple[int, ...], dims: str) -> jax.Array:
    """jnp.reshape to a shape whose dimensions are named dims."""
    return jnp.reshape(x, shape, out_sharding=_spec_for(dims, len(shape), x))


def varying(x: jax.Array, *like: jax.Array, axes: tuple[str, ...] = ()) -> jax.Array:
    """x typed as different on every index of the manual axes over which any of like differs, and of axes.

    A cast of the type alone: no data moves, and the gradient is not reduced where it is applied outside of the vjp.
    """
    have = _varying_over(x)
    wanted = set(axes).union(*(_varying_over(other) for other in like))
    missing = tuple(sorted(wanted - have))
    return lax.pcast(x, missing, to="varying") if missing else x


def _varying_over(x: jax.Array) -> set[str]:
    return set(jax.typeof(x).manual_axis_type.varying)


def zeros(like: Any, *lead: int) -> jax.Array:
    """Zeros of the shape, type and layout of like, an array or a jax.ShapeDtypeStruct, with leading dimensions."""
    lies = PartitionSpec() if like.sharding is None else like.sharding.spec
    split = any(entry is not None for entry in lies)
    where = PartitionSpec(*(None,) * len(lead), *lies) if split else None
    return jnp.zeros((*lead, *like.shape), like.dtype, out_sharding=where)


def zeros_like(like: Any, *varies: jax.Array) -> jax.Array:
    """zeros, typed as different where any of varies is."""
    return varying(zeros(like), *varies)
