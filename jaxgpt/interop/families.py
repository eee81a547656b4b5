"""Names and layouts of tensors, family by family: one table for each, read in both directions.

A row says of one parameter of ours under which name a file holds it, and the dimensions of that tensor: a dimension of
the file is one of ours, or several merged by `*`, from the outermost. `1/3` is entry 1 of 3 stacked in one tensor,
`head~` a head whose rotary pairs lie side by side (0, K/2, 1, K/2 + 1, ...) where ours has halves. Our own dimensions
are those of model.parameters, without `layers`, whose number stands for {} in a name.
"""

from dataclasses import dataclass

Rows = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Family:
    """One layout of a model's tensors."""

    kind: str
    """What a configuration calls it: model_type, or GGUF's general.architecture."""
    tensors: Rows
    """Parameter -> (name in a file, dimensions there). A model holds those of them that its configuration says."""
    architecture: str = ""
    """The class that transformers makes of it."""
    prefix: str = ""
    """Beginning of most names, which files of the bare model leave out."""
    aliases: tuple[tuple[str, str], ...] = ()
    """(name, another name that some files have for it)."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensors that hold no parameter: masks and tables that follow from the configuration."""


def _gpt2() -> Rows:
    layer = "transformer.h.{}."
    rows = {
        "embedding.token.weight": ("transformer.wte.weight", "vocab embed"),
        "embedding.position.weight": ("transformer.wpe.weight", "positions embed"),
        "blocks.norm1.scale": (layer + "ln_1.weight", "norm"),
        "blocks.norm1.bias": (layer + "ln_1.bias", "norm"),
        "blocks.norm2.scale": (layer + "ln_2.weight", "norm"),
        "blocks.norm2.bias": (layer + "ln_2.bias", "norm"),
        "blocks.attention.out.weight": (layer + "attn.c_proj.weight", "heads*head embed"),
        "blocks.attention.out.bias": (layer + "attn.c_proj.bias", "norm"),
        "blocks.mlp.up.weight": (layer + "mlp.c_fc.weight", "embed mlp"),
        "blocks.mlp.up.bias": (layer + "mlp.c_fc.bias", "mlp"),
        "blocks.mlp.down.weight": (layer + "mlp.c_proj.weight", "mlp embed"),
        "blocks.mlp.down.bias": (layer + "mlp.c_proj.bias", "norm"),
        "final_norm.scale": ("transformer.ln_f.weight", "norm"),
        "final_norm.bias": ("transformer.ln_f.bias", "norm"),
        "head.weight": ("lm_head.weight", "vocab embed"),
    }
    for number, (part, heads) in enumerate((("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads"))):
        rows[f"blocks.attention.{part}.weight"] = (layer + "attn.c_attn.weight", f"embed {number}/3*{heads}*head")
        rows[f"blocks.attention.{part}.bias"] = (layer + "attn.c_attn.bias", f"{number}/3*{heads}*head")
    return rows


def _neox() -> Rows:
    layer = "gpt_neox.layers.{}."
    rows = {
        "embedding.token.weight": ("gpt_neox.embed_in.weight", "vocab embed"),
        "blocks.norm1.scale": (layer + "input_layernorm.weight", "norm"),
        "blocks.norm1.bias": (layer + "input_layernorm.bias", "norm"),
        "blocks.norm2.scale": (layer + "post_attention_layernorm.weight", "norm"),
        "blocks.norm2.bias": (layer + "post_attention_layernorm.bias", "norm"),
        "blocks.attention.out.weight": (layer + "attention.dense.weight", "embed heads*head"),
        "blocks.attention.out.bias": (layer + "attention.dense.bias", "norm"),
        "blocks.mlp.up.weight": (layer + "mlp.dense_h_to_4h.weight", "mlp embed"),
        "blocks.mlp.up.bias": (layer + "mlp.dense_h_to_4h.bias", "mlp"),
        "blocks.mlp.down.weight": (layer + "mlp.dense_4h_to_h.weight", "embed mlp"),
        "blocks.mlp.down.bias": (layer + "mlp.dense_4h_to_h.bias", "norm"),
        "final_norm.scale": ("gpt_neox.final_layer_norm.weight", "norm"),
        "final_norm.bias": ("gpt_neox.final_layer_norm.bias", "norm"),
        "head.weight": ("embed_out.weight", "vocab embed"),
    }
    fused = layer + "attention.query_key_value."
    for number, (part, heads) in enumerate((("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads"))):
        rows[f"blocks.attention.{part}.weight"] = (fused + "weight", f"{heads}*{number}/3*head embed")
        rows[f"blocks.attention.{part}.bias"] = (fused + "bias", f"{heads}*{number}/3*head")
    return rows


def _llama() -> Rows:
    layer = "model.layers.{}."
    rows = {
        "embedding.token.weight": ("model.embed_tokens.weight", "vocab embed"),
        "blocks.norm1.scale": (layer + "input_layernorm.weight", "norm"),
        "blocks.norm2.scale": (layer + "post_attention_layernorm.weight", "norm"),
        "blocks.attention.out.weight": (layer + "self_attn.o_proj.weight", "embed heads*head"),
        "blocks.attention.out.bias": (layer + "self_attn.o_proj.bias", "norm"),
        "blocks.attention.query_norm.scale": (layer + "self_attn.q_norm.weight", "head"),
        "blocks.attention.key_norm.scale": (layer + "self_attn.k_norm.weight", "head"),
        "blocks.mlp.down.weight": (layer + "mlp.down_proj.weight", "embed mlp"),
        "blocks.mlp.down.bias": (layer + "mlp.down_proj.bias", "norm"),
        "final_norm.scale": ("model.norm.weight", "norm"),
        "head.weight": ("lm_head.weight", "vocab embed"),
    }
    for part, heads in (("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads")):
        rows[f"blocks.attention.{part}.weight"] = (layer + f"self_attn.{part[0]}_proj.weight", f"{heads}*head embed")
        rows[f"blocks.attention.{part}.bias"] = (layer + f"self_attn.{part[0]}_proj.bias", f"{heads}*head")
    for part in ("gate", "up"):
        rows[f"blocks.mlp.{part}.weight"] = (layer + f"mlp.{part}_proj.weight", "mlp embed")
        rows[f"blocks.mlp.{part}.bias"] = (layer + f"mlp.{part}_proj.bias", "mlp")
    return rows


def _gguf(head: str) -> Rows:
    """GGUF's names for models of LLaMA's kind; head: how queries and keys lie in their heads."""
    layer = "blk.{}."
    rows = {
        "embedding.token.weight": ("token_embd.weight", "vocab embed"),
        "blocks.norm1.scale": (layer + "attn_norm.weight", "norm"),
        "blocks.norm2.scale": (layer + "ffn_norm.weight", "norm"),
        "blocks.attention.out.weight": (layer + "attn_output.weight", "embed heads*head"),
        "blocks.attention.query_norm.scale": (layer + "attn_q_norm.weight", "head"),
        "blocks.attention.key_norm.scale": (layer + "attn_k_norm.weight", "head"),
        "blocks.mlp.gate.weight": (layer + "ffn_gate.weight", "mlp embed"),
        "blocks.mlp.up.weight": (layer + "ffn_up.weight", "mlp embed"),
        "blocks.mlp.down.weight": (layer + "ffn_down.weight", "embed mlp"),
        "final_norm.scale": ("output_norm.weight", "norm"),
        "head.weight": ("output.weight", "vocab embed"),
    }
    for part, heads, width in (("query", "heads", head), ("key", "kv_heads", head), ("value", "kv_heads", "head")):
        rows[f"blocks.attention.{part}.weight"] = (layer + f"attn_{part[0]}.weight", f"{heads}*{width} embed")
        rows[f"blocks.attention.{part}.bias"] = (layer + f"attn_{part[0]}.bias", f"{heads}*{width}")
    return rows


_ROTARY = r".*rotary_emb\.inv_freq"

HUGGING_FACE = {
    family.kind: family
    for family in (
        Family("gpt2", _gpt2(), "GPT2LMHeadModel", "transformer.", ignored=(r".*\.attn\.(bias|masked_bias)",)),
        Family(
            "gpt_neox",
            _neox(),
            "GPTNeoXForCausalLM",
            "gpt_neox.",
            (("embed_out.weight", "lm_head.weight"),),
            (_ROTARY, r".*\.attention\.(bias|masked_bias)"),
        ),
        Family("llama", _llama(), "LlamaForCausalLM", "model.", ignored=(_ROTARY,)),
        Family("mistral", _llama(), "MistralForCausalLM", "model.", ignored=(_ROTARY,)),
        Family("qwen2", _llama(), "Qwen2ForCausalLM", "model.", ignored=(_ROTARY,)),
        Family("qwen3", _llama(), "Qwen3ForCausalLM", "model.", ignored=(_ROTARY,)),
    )
}
"""By model_type."""

GGUF = {
    "llama": Family("llama", _gguf("head~"), ignored=(r"rope_freqs\.weight",)),
    "qwen2": Family("qwen2", _gguf("head")),
    "qwen3": Family("qwen3", _gguf("head")),
}
"""By general.architecture. Mistral's models are called llama there, and llama's queries and keys lie permuted."""
