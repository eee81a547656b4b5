"""The attention kernel on split heads, with what it keeps computed again or handed out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import LLAMA, run_config

from jaxgpt.model import attention
from jaxgpt.sharding.layout import MANUAL, Layout
from jaxgpt.sharding.mesh import build, parse
from jaxgpt.sharding.named import layout


def inputs() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(k, (4, 16, heads, 8)) for k, heads in zip(keys, (8, 4, 4, 8), strict=True))


def plainly(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
    k, v = (jnp.repeat(x, 2, 2) for x in (k, v))
    distance = jnp.arange(16)[:, None] - jnp.arange(16)
    seen = (distance >= 0) & (distance < (window or 16))
    scores = jnp.where(seen, jnp.einsum("bsnk,btnk->bnst", q, k) / 8**0.5, -jnp.inf)
    return jnp.einsum("bnst,btnk->bsnk", jax.nn.softmax(scores), v)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kernel", ["xla", "cudnn", "blocked"])
@pytest.mark.parametrize("mesh", ["data=1", "data=2,tensor=4"])
def test_output_and_gradients(monkeypatch: pytest.MonkeyPatch, mesh: str, kernel: str, window: int | None) -> None:
    if kernel == "cudnn":  # its path, which hands out what the kernel keeps, with a kernel that a CPU has
        real = attention.jax.nn.dot_product_attention

        def plain_kernel(*x: jax.Array, implementation: str, **more: object) -> jax.Array:
            return real(*x, implementation="xla", **more)

        monkeypatch.setattr(attention.jax.nn, "dot_product_attention", plain_kernel)
    monkeypatch.setattr(attention.blocked, "QUERIES", 4)  # several blocks
    monkeypatch.setattr(attention.blocked, "CACHED_SCORES", 1024)  # several groups of samples
    sizes = parse(mesh)
    devices = build(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    rules = Layout.of(run_config(LLAMA), sizes).typed()

    def inside(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        with layout(rules):
            out, derivative = jax.vjp(lambda *x: attention.attention(*x, kernel, window), q, k, v)
            return out, *derivative(dout)

    spec, heads = P("data"), P("data", None, "tensor")
    over = jax.jit(jax.shard_map(inside, mesh=devices, in_specs=spec, out_specs=spec, axis_names=set(MANUAL)))
    q, k, v, dout = inputs()
    placed = [jax.device_put(x, jax.sharding.NamedSharding(devices, heads)) for x in (q, k, v, dout)]
    wanted, derivative = jax.vjp(lambda *x: plainly(*x, window), q, k, v)
    for ours, theirs in zip(over(*placed), (wanted, *derivative(dout)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_kernel_is_chosen_by_device_and_type() -> None:
    assert attention.kernel_for("gpu", "bf16") == "cudnn"
    assert attention.kernel_for("gpu", "fp32") == "xla"  # the fused kernel has no fp32
    assert attention.kernel_for("cpu", "bf16") == "blocked"
