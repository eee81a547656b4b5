"""The names of an array's dimensions, told from its sizes: a traced program knows shapes alone."""

import itertools
import math
from collections.abc import Mapping

from jaxgpt.config import RunConfig
from jaxgpt.pipeline.microbatches import micro_batch


def dimension_names(
    shape: tuple[int, ...], config: RunConfig, sizes: Mapping[str, int], split: bool = False
) -> tuple[str, ...]:
    """The name of each dimension of one of a step's arrays; "" where none or several have that size.

    Activations begin with batch and sequence, as the devices of the manual axes hold them. split: the shape is what one
    device holds, so that a dimension may be any part of the whole.
    """
    first, rest = _sizes(config, sizes)

    def named(n: int, known: Mapping[str, int]) -> str:
        found = [name for name, whole in known.items() if n in (_parts(whole, sizes) if split else {whole})]
        return found[0] if len(found) == 1 else ""

    leads = [name for n, (name, whole) in zip(shape, first.items(), strict=False) if named(n, {name: whole})]
    if len(leads) == len(first):
        return (*leads, *(named(n, rest) for n in shape[len(first) :]))
    return tuple(named(n, first | rest) for n in shape)


def _sizes(config: RunConfig, sizes: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Size of each dimension: of batch and sequence a device's part on the manual axes, of the others the whole."""
    model, batch = config.model, micro_batch(config, sizes)
    seq = model.seq // sizes["context"]
    rest = {
        "layers": model.layers,
        "embed": model.width,
        "heads": model.heads,
        "head": model.head,
        "group": model.heads // model.kv + 2,
        "mlp": model.mlp,
        "vocab": model.padded_vocab,
        "tokens": batch * seq,
    }
    if model.gated:
        rest["branch"] = 2
    if model.kv < model.heads:
        rest["kv_heads"] = max(model.kv, sizes["tensor"])
    return {"batch": batch, "seq": seq}, rest


def _parts(whole: int, sizes: Mapping[str, int]) -> set[int]:
    """What a device may hold of a dimension, by the axes that may split it."""
    large = [n for n in sizes.values() if n > 1]
    products = {math.prod(some) for count in range(len(large) + 1) for some in itertools.combinations(large, count)}
    return {whole // n for n in products if whole % n == 0}
