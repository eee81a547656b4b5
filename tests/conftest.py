"""The tests' setting: eight virtual CPU devices, shapes and types checked at run time, nothing cached on disk."""

import os

os.environ.setdefault("MPLBACKEND", "agg")

import jax

if jax.__version_info__ < (0, 12):
    # A third of the time that a tiny program takes to compile; later versions know no other way.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"

from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
# A program found in a cache is one that was not compiled: the tests compile what they test.
jax.config.update("jax_enable_compilation_cache", False)

install_import_hook("jaxgpt", "beartype.beartype")
