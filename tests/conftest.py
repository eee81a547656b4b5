"""The tests' setting: eight virtual CPU devices, shapes and types checked at run time, nothing cached on disk."""

import os

os.environ.setdefault("MPLBACKEND", "agg")

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
# A program found in a cache is one that was not compiled: the tests compile what they test.
jax.config.update("jax_enable_compilation_cache", False)

install_import_hook("jaxgpt", "beartype.beartype")
