"""FLOPs of a step, counted the ways that published figures count them.

MFU is model FLOPs / (time x peak x devices), HFU the same with what is recomputed. Which formula and which peak is said
wherever one is printed: figures by different formulas cannot be compared.
"""

from jaxgpt.config import ModelConfig
from jaxgpt.recomputation import Kind


def matrix_weights(model: ModelConfig) -> float:
    """Entries of the matrices that a token passes, the head's among them, padding not counted."""
    attention = model.width * model.head * 2 * (model.heads + model.kv)
    mlp = (3 if model.gated else 2) * model.width * model.mlp
    return float(model.layers * (attention + mlp) + model.width * model.vocab)


def keys(model: ModelConfig) -> float:
    """Keys that a query attends to, on average: (seq + 1) / 2, fewer with a window."""
    reach = min(model.window or model.seq, model.seq)
    return reach * (model.seq - (reach - 1) / 2) / model.seq


def flops_per_token(model: ModelConfig) -> float:
    """Model FLOPs of one token, forward and backward, at the full context: no recomputation, no padding.

    6 for each weight of a matrix that it passes, plus 12 x heads x head width for each key that it attends to, in each
    layer: causal attention, as it is computed.
    """
    return 6.0 * matrix_weights(model) + 12.0 * model.layers * model.heads * model.head * keys(model)


def recomputed_per_token(model: ModelConfig, recompute: Kind) -> float:
    """FLOPs of one token that recomputation in all layers adds in jaxgpt: with full, a block's forward without its last
    product, whose result its backward does not need; with selective none that is counted, since products and attention
    are kept."""
    if recompute != "full":
        return 0.0
    attention = 4.0 * model.layers * model.heads * model.head * keys(model)
    blocks = matrix_weights(model) - model.width * model.vocab
    return 2.0 * (blocks - model.layers * model.mlp * model.width) + attention


def megatron_hardware(model: ModelConfig, sequences: int) -> float:
    """FLOPs of a step with full recomputation, attention not halved: arXiv 2104.04473, eq. 3,
    96 B s l h^2 (1 + s / (6 h) + V / (16 l h)). megatron_sc21 and DLPerf count so. For GPT's shapes alone."""
    s, layers, h, vocab = model.seq, model.layers, model.width, model.vocab
    return 96.0 * sequences * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))


def megatron_model(model: ModelConfig, sequences: int) -> float:
    """The same without recomputation: 72 B s l h^2 (1 + s / (6 h) + V / (12 l h)). Megatron-LM's table for H100s counts
    so."""
    s, layers, h, vocab = model.seq, model.layers, model.width, model.vocab
    return 72.0 * sequences * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
