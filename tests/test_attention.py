"""Attention kernels on split heads, whole and round a ring, against scores in the open."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny import LLAMA, run_config

from jaxgpt.model import attention, blocked
from jaxgpt.sharding import ring
from jaxgpt.sharding.layout import Layout
from jaxgpt.sharding.mesh import build, parse
from jaxgpt.sharding.named import layout
from jaxgpt.sharding.rows import MANUAL

pytestmark = pytest.mark.core

SEQ = 32


def inputs() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(k, (4, SEQ, heads, 8)) for k, heads in zip(keys, (8, 4, 4, 8), strict=True)]


def starts() -> np.ndarray:
    """Where each token's document begins: some within a chunk of a split sequence, some over several."""
    rng = np.random.default_rng(1)
    begins = rng.random((4, SEQ)) < np.array([0.0, 0.1, 0.2, 0.5])[:, None]
    return np.maximum.accumulate(np.where(begins, np.arange(SEQ), 0), 1).astype(np.int32)


def scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bsnk,btnk->bnst", q, jnp.repeat(k, 2, 2)) / 8**0.5


def plainly(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, starts: np.ndarray | None = None
) -> jax.Array:
    distance = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)
    seen = (distance >= 0) & (distance < (window or SEQ))
    if starts is not None:
        seen = seen & (starts[:, None, :, None] == starts[:, None, None])
    weights = jax.nn.softmax(jnp.where(seen, scores(q, k), -jnp.inf))
    return jnp.einsum("bnst,btnk->bsnk", weights, jnp.repeat(v, 2, 2))


def fused(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None, **options: Any) -> jax.Array:
    """A kernel that keeps what the fused one on GPUs keeps: inputs, log-sum-exp [B, N, S], output."""
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    reach = options["local_window_size"]
    seen = (distance >= 0) & (distance <= reach[0] if reach else True) if options["is_causal"] else True

    def masked(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.where(seen, scores(q, k) + (0.0 if bias is None else bias), -1e30)

    @jax.custom_vjp
    def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(q, k, v)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        sums = jax.nn.logsumexp(masked(q, k), -1)
        weights = jnp.exp(masked(q, k) - sums[..., None])
        out = jnp.einsum("bnst,btnk->bsnk", weights, jnp.repeat(v, 2, 2))
        return out, (q, k, v, sums, out)

    def backward(kept: Any, dout: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, sums, out = kept
        found, derivative = jax.vjp(masked, q, k)
        weights = jnp.exp(found - sums[..., None])
        products = jnp.einsum("bsnk,btnk->bnst", dout, jnp.repeat(v, 2, 2))
        dq, dk = derivative(weights * (products - jnp.einsum("bsnk,bsnk->bns", dout, out)[..., None]))
        dv = jnp.einsum("bnst,bsnk->btnk", weights, dout)
        return dq, dk, dv.reshape(*v.shape[:3], 2, -1).sum(3)

    kernel.defvjp(forward, backward)
    return kernel(q, k, v)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "QUERIES", 4)  # several blocks of queries
    monkeypatch.setattr(blocked, "CACHED_SCORES", 1024)  # several groups of samples


CASES = [
    ("data=1", "ring", None, False),
    ("data=1", "ring", 5, False),
    ("data=1", "ring", 5, True),
    ("data=2,tensor=4", "ring", None, True),
    ("data=2,tensor=4", "ring", 5, False),
    ("context=2", "ring", None, False),
    ("context=2,tensor=2", "gather", None, True),
    ("context=8", "ring", None, False),
    ("context=4", "ring", None, True),
    ("context=4", "gather", None, False),
]
"""Mesh, form of context parallelism, window, and whether documents are apart."""


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kernel", attention.KERNELS)
@pytest.mark.parametrize(("mesh", "form", "window", "apart"), CASES)
def test_output_and_gradients(
    monkeypatch: pytest.MonkeyPatch, mesh: str, form: str, window: int | None, apart: bool, kernel: str
) -> None:
    if kernel == "cudnn":
        monkeypatch.setattr(jax.nn, "dot_product_attention", fused)
    sizes = parse(mesh)
    devices = build(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    rules = Layout.of(run_config(LLAMA, context_attention=form), sizes)

    def inside(starts: Any, q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        with layout(rules.typed(), rules.sequence):
            out, derivative = jax.vjp(lambda *x: attention.attention(*x, kernel, window, starts), q, k, v)
            return out, *derivative(dout)

    spec = P("data", "context")
    over = jax.jit(jax.shard_map(inside, mesh=devices, in_specs=spec, out_specs=spec, axis_names=set(MANUAL)))
    places = ring.order(SEQ, sizes["context"])
    heads = NamedSharding(devices, P("data", "context", "tensor" if sizes["tensor"] > 1 else None))
    documents = starts() if apart else None
    begin = None if documents is None else jax.device_put(documents[:, places], NamedSharding(devices, spec))
    found = over(begin, *(jax.device_put(np.asarray(x)[:, places], heads) for x in inputs()))
    q, k, v, dout = inputs()
    wanted, derivative = jax.vjp(lambda *x: plainly(*x, window, documents), q, k, v)
    for ours, theirs in zip(found, (wanted, *derivative(dout)), strict=True):
        np.testing.assert_allclose(np.asarray(ours)[:, np.argsort(places)], theirs, rtol=1e-5, atol=1e-5)


def test_a_fused_kernel_that_keeps_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of JAX whose kernel keeps no output would make wrong gradients in silence."""

    def other(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        return plainly(q, k, v, None)

    monkeypatch.setattr(jax.nn, "dot_product_attention", other)
    q, k, v, dout = inputs()
    with pytest.raises(RuntimeError, match="does not keep its output"):
        attention.Part("cudnn").backward(q, k, v, q, q[..., 0], dout)


def test_the_split_sequence_gives_every_device_as_much_to_attend_to() -> None:
    places = ring.order(64, 4).reshape(4, 16)
    assert sorted(places.ravel().tolist()) == list(range(64))
    pairs = [sum(int(p) + 1 for p in device) for device in places]
    assert len(set(pairs)) == 1


def test_the_kernel_is_chosen_by_device_and_type() -> None:
    assert attention.kernel_for("gpu", "bf16") == "cudnn"
    assert attention.kernel_for("gpu", "fp32") == "xla"  # the fused kernel has no fp32
    assert attention.kernel_for("cpu", "bf16") == "blocked"
    # its masks have an even length
    assert [attention.kernel_for("cuda", "bf16", n) for n in (64, 63)] == ["cudnn", "xla"]
