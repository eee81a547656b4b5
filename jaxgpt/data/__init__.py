"""Text to batches: sources, tokenizer, token store, blends, order of samples, loader. Nothing here needs JAX."""

from jaxgpt.data.loader import NO_TARGET, Prefetcher, samples_in, training_batch, validation_batches
from jaxgpt.data.mixture import Mixture, open_mixture
from jaxgpt.data.order import sample_indices
from jaxgpt.data.store import Dataset, Text, cache_folder, given_tokenizer, open_dataset, open_text
from jaxgpt.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "NO_TARGET",
    "Dataset",
    "Mixture",
    "Prefetcher",
    "Text",
    "Tokenizer",
    "cache_folder",
    "given_tokenizer",
    "load_tokenizer",
    "open_dataset",
    "open_mixture",
    "open_text",
    "sample_indices",
    "samples_in",
    "training_batch",
    "validation_batches",
]
