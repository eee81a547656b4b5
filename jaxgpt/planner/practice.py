"""What programs make of a plan, where they differ: so that one model can be held against what others have published.

JAXGPT is what is planned for. The others say what is known of the programs behind published figures: passes over memory
are counted from their kernels; shares that hide, and what OneFlow holds, are judged from what is written about them
with the published tables in view.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How often memory is read or written, in units of one array in 16 bits, by a block's element-wise work. stream: of
    the residual stream, [tokens, width]; inside: of as much, but split over `tensor`; scores: of attention's, where
    they are not fused."""

    stream: float
    inside: float
    scores: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Held:
    """What another program than jaxgpt holds, bytes. Its own types and habits, as far as they are known."""

    parameter: int
    """Of each parameter: weights, masters, gradients, moments."""
    reduced: int
    """Of each parameter beside, where there are replicas: buckets for the reduction of gradients."""
    logit: int
    """Of each logit of a microbatch."""
    boundary: int
    """Of each element of the stream, between blocks that are recomputed."""
    overhead: int
    """Of a process: driver, libraries, their workspaces."""
    communication: int
    """Buffers of the communication library, where there is more than one device."""
    twice: bool = False
    """1F1B holds 2 p - 1 microbatches on the first of p stages, not p."""

    def microbatches(self, stages: int) -> int:
        """Held by the first stage in 1F1B."""
        return 2 * stages - 1 if self.twice else stages


@dataclass(frozen=True, kw_only=True)
class Practice:
    """One program's ways. Bytes are a parameter's or a logit's; shares are of 1."""

    name: str
    fused_attention: bool
    """One kernel, which computes no more than the keys that are seen; else scores are made, all of them, and kept."""
    forward: Passes
    backward: Passes
    logit_bytes: float
    """Read and written for each logit, forward and backward, beside the products."""
    shared_ends: bool
    """Embedding and head are shared by all stages; else they lie on the first and the last."""
    tied_ticks: bool
    """All stages exchange after each tick; else a stage waits only for its neighbour."""
    repeats_all: bool
    """Full recomputation repeats the whole block; else what the backward needs."""
    repeats_attention: bool
    """Selective recomputation repeats attention (arXiv 2205.05198); else element-wise work alone."""
    split_messages: bool
    """What is sent to the next stage is split over `tensor`, and gathered there (arXiv 2104.04473, section 4.1)."""
    gradient_bytes: int
    """As communicated."""
    accumulate_bytes: float
    """Read and written to add a microbatch's gradients to the others."""
    update_bytes: float
    """Read and written by the optimizer, clipping and casts included."""
    hidden_gradients: float
    """Share of a last backward under which the reduction of gradients can hide, and of a first forward under which the
    gathering of updated parameters can; 0 where it comes after."""
    hidden_weights: float
    """Share of a block's computation under which its own gathers and reductions (ZeRO 2 and 3, fsdp) can hide."""
    hidden_tensor: float
    """Share of the communication over `tensor` that runs beside products."""
    hidden_pipe: float
    """Share of the messages between stages that runs beside computation."""
    held: Held | None = None
    """None: what jaxgpt's compiled step holds."""
    masked: bool = False
    """Attention is given a mask of every query and key, since documents are apart."""

    def __hash__(self) -> int:
        """Of the name alone: a search asks for it thousands of times."""
        return hash(self.name)


JAXGPT = Practice(
    name="jaxgpt",
    fused_attention=True,
    # norms 2 x 4, residual sums 2 x 3; parting of queries, keys and values 6, activation 8, bias and layout 2
    forward=Passes(stream=14.0, inside=16.0),
    # norms 2 x 8, residual sums 2 x 3; activation 12, gradients of biases 7, joining of queries, keys and values 6, 2
    backward=Passes(stream=22.0, inside=27.0),
    logit_bytes=26.0,
    shared_ends=True,
    tied_ticks=True,
    repeats_all=False,
    repeats_attention=False,
    split_messages=False,
    gradient_bytes=4,
    accumulate_bytes=12.0,
    update_bytes=38.0,
    hidden_gradients=0.0,
    hidden_weights=0.5,
    hidden_tensor=0.0,
    hidden_pipe=0.0,
)

SEPARATE = replace(JAXGPT, name="jaxgpt, documents separate", masked=True)
"""The same where no document sees another."""


def ours(documents: str) -> Practice:
    """jaxgpt's, by what --documents says."""
    return SEPARATE if documents == "separate" else JAXGPT


MEGATRON_2021 = Practice(
    name="Megatron-LM, 2021",
    fused_attention=False,
    # norms 2 x 2, bias with dropout and sum 2 x 3.5; bias with GELU 8, layouts 2; softmax 2, dropout 2.5
    forward=Passes(stream=11.0, inside=10.0, scores=4.5),
    # norms 2 x 5, sums 2 x 3, dropout and bias 2 x 3.5; GELU 16, layouts 8, bias 3; softmax 3, dropout 2.5
    backward=Passes(stream=23.0, inside=27.0, scores=5.5),
    logit_bytes=52.0,
    shared_ends=False,
    tied_ticks=False,
    repeats_all=True,
    repeats_attention=True,
    split_messages=True,
    gradient_bytes=2,
    accumulate_bytes=6.0,
    update_bytes=44.0,
    hidden_gradients=0.0,
    hidden_weights=0.0,
    hidden_tensor=0.0,
    hidden_pipe=0.0,
    held=Held(parameter=18, reduced=0, logit=10, boundary=2, overhead=450 << 20, communication=400 << 20),
)

MEGATRON_2026 = Practice(
    name="Megatron-LM, 2026",
    fused_attention=True,
    forward=Passes(stream=11.0, inside=10.0),
    backward=Passes(stream=23.0, inside=27.0),
    logit_bytes=52.0,
    shared_ends=False,
    tied_ticks=False,
    repeats_all=True,
    repeats_attention=True,
    split_messages=True,
    gradient_bytes=4,
    accumulate_bytes=8.0,
    update_bytes=38.0,
    hidden_gradients=0.9,
    hidden_weights=0.9,
    hidden_tensor=0.7,
    hidden_pipe=0.9,
    held=Held(parameter=18, reduced=0, logit=10, boundary=2, overhead=450 << 20, communication=400 << 20),
)

ONEFLOW_2021 = Practice(
    name="OneFlow, 2021",
    fused_attention=False,
    forward=MEGATRON_2021.forward,
    backward=MEGATRON_2021.backward,
    logit_bytes=30.0,
    shared_ends=False,
    tied_ticks=False,
    repeats_all=True,
    repeats_attention=True,
    split_messages=False,
    gradient_bytes=2,
    accumulate_bytes=6.0,
    update_bytes=38.0,
    hidden_gradients=0.8,
    hidden_weights=0.0,
    hidden_tensor=0.0,
    hidden_pipe=0.9,
    # fp32 masters, moments, weights and gradients in fp16, and fp32 gradients never whole: 4 + 8 + 2 + 2 + 2. A logit's
    # value, softmax and gradient in fp16. Each block's input, and the same as what the block before it made.
    held=Held(parameter=18, reduced=2, logit=6, boundary=4, overhead=450 << 20, communication=400 << 20, twice=True),
)
