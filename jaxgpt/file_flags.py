"""What the verbs of data and of checkpoints take: those that read and write files, without a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxgpt.flags import Run


@dataclass(frozen=True, kw_only=True)
class PrepareFlags:
    """Tokenizes a source once, into a folder that --data takes as it is. Goes on where it was cut off."""

    data: str
    """A file, folder or pattern of text, JSONL or Parquet (PATH#FIELD), or stdlib."""
    out: Path
    """Folder to make."""
    tokenizer: str = "bpe"
    """bytes, chars, bpe (trained from the data), a tokenizer.json, or a folder with GPT-2's two files."""
    vocab: int | None = None
    """Most entries; None: the tokenizer's own, and 32768 of a bpe."""
    validation: float = 0.05
    """Share of the text, at the end, kept for validation."""
    workers: int | None = None
    """Processes; None: one for each core."""


@dataclass(frozen=True, kw_only=True)
class InspectFlags:
    """Documents, tokens, splits, checksum and some decoded documents of data."""

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """A prepared folder, Megatron's files, or what prepare takes, which is read without a tokenizer."""
    tokenizer: str = "bpe"
    """Of Megatron's files, to decode them; else the folder's own is taken."""
    documents: int = 3
    """Documents shown, spread evenly over the train part."""


@dataclass(frozen=True, kw_only=True)
class BlendFlags:
    """What a blend takes of each source, and a checksum of its order."""

    data: str
    """Sources with weights, such as 0.7:a.jsonl,0.3:b/"""
    tokenizer: str = "bpe"
    """As for train."""
    vocab: int = 32_768
    """As for train."""
    validation: float = 0.05
    """As for train."""
    seq: int = 1024
    """Context length in tokens."""
    seed: int = 0
    """Of the order."""
    samples: int = 10_000
    """Samples from the start of a run that are counted."""


@dataclass(frozen=True, kw_only=True)
class ListFlags:
    """The checkpoints of a run: step, validation loss, size, when it was saved, and why it is kept."""

    run: Run
    """Folder of the run, or one of checkpoints."""


@dataclass(frozen=True, kw_only=True)
class LookFlags:
    """What a checkpoint holds: step, samples, loss, configuration, and every array with shape, type and bytes."""

    run: Run
    """Folder of the run, or one of checkpoints."""
    step: str = "last"
    """A step, last, or best, the one with the least validation loss."""


@dataclass(frozen=True, kw_only=True)
class VerifyFlags:
    """Reads every byte of a run's checkpoints, holds it against its checksum, and names each damaged file; exits with 1
    where there is one."""

    run: Run
    """Folder of the run, or one of checkpoints."""
    step: str = "all"
    """A step, last, best, or all."""


@dataclass(frozen=True, kw_only=True)
class ParametersFlags:
    """Writes the parameters of a checkpoint into one safetensors file: fp32, by jaxgpt's names, without padding. For
    the names of Hugging Face, see jaxgpt export."""

    run: Run
    """Folder of the run, or one of checkpoints."""
    out: Annotated[Positional[Path], arg(metavar="OUT")]
    """File to write, which must end in .safetensors and not exist."""
    step: str = "last"
    """A step, last, or best, the one with the least validation loss."""
