"""How a device's share of the batch is cut into microbatches."""

from collections.abc import Mapping

from jaxgpt.config import RunConfig

FILL = 4
"""Microbatches a stage, at most, where the user leaves their number open: 1F1B then idles about a fifth of its time."""


def micro_batch(config: RunConfig, sizes: Mapping[str, int]) -> int:
    """Sequences that a device runs at once: what the user says; else all of its share, or, over `pipe`, as few as
    give each stage FILL microbatches or fewer (interleaved: a multiple of the stages)."""
    share = max(1, config.global_batch // (sizes["data"] * sizes["fsdp"]))
    if config.micro_batch is not None:
        return config.micro_batch
    stages = sizes["pipe"]
    if stages == 1:
        return share
    unit = stages if config.schedule == "interleaved" else 1
    counts = [m for m in range(1, min(share, FILL * stages) + 1) if share % m == 0]
    return share // max([m for m in counts if m % unit == 0] or counts)
