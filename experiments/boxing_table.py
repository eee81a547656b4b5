"""Every change of SBP signature on a mesh: its steps, the bytes that one device receives, and whether the compiled
program's collectives are those.

    python experiments/boxing_table.py [--mesh a=2,b=4] [--shape 64,128]

Prints a table in Markdown, made on virtual CPU devices.
"""

import argparse
import itertools
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxgpt import use_devices
from jaxgpt.sharding.boxing import path, to_sbp
from jaxgpt.sharding.hlo import KINDS, collectives
from jaxgpt.sharding.sbp import B, P, S, Signature


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="a=2,b=4", help="axes and sizes")
    parser.add_argument("--shape", default="64,128", help="of the fp32 tensor")
    arguments = parser.parse_args()
    sizes = {axis: int(size) for axis, size in (item.split("=") for item in arguments.mesh.split(","))}
    shape = tuple(int(size) for size in arguments.shape.split(","))
    use_devices(math.prod(sizes.values()))
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))

    places = [*(S(dim) for dim in range(len(shape))), B, P]
    signatures = [
        Signature(dict(zip(sizes, combination, strict=True)))
        for combination in itertools.product(places, repeat=len(sizes))
    ]
    print("| from | to | steps | bytes received | as compiled |\n|---|---|---|---|---|")
    for source, target in itertools.permutations(signatures, 2):
        steps = path(source, target, shape, 4, sizes)
        array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, source.spec()))
        text = jax.jit(to_sbp, static_argnums=1).lower(array, target).compile().as_text()
        found = [(c.kind, c.axes(sizes), c.received) for c in collectives(text)]
        stated = [(s.cost.kind, (s.axis,), s.cost.received) for s in steps if s.cost.kind in KINDS]
        said = "; ".join(f"{s.axis}: {s.source} to {s.target}, {s.cost.kind}" for s in steps)
        received = float(sum(s.cost.received for s in steps))
        print(f"| {source} | {target} | {said} | {received:.0f} | {'the same' if found == stated else found} |")


if __name__ == "__main__":
    main()
