"""A plan: how a model is to be trained on a mesh, as a plain value; and what is predicted of it.

    plan = Plan.of(preset("gpt3-175b"), parse("pipe=8,data=16,tensor=8"), "a100-80gb")
    plan.apply(config)        # the same as a run's configuration
    plan.to_json()            # and as a file

Nothing is computed here. planner.estimate predicts, and fills in Memory, Time and Estimate:

    estimate(model: ModelConfig, plan: Plan, hardware: Hardware, global_batch: int, practice: Practice = JAXGPT)
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxgpt.config import ModelConfig, RunConfig
from jaxgpt.config_file import check_types
from jaxgpt.errors import UserError
from jaxgpt.pipeline.microbatches import micro_batch
from jaxgpt.recomputation import recomputation
from jaxgpt.sharding.mesh import Sizes, format_mesh, parse
from jaxgpt.sharding.rows import AXES

CHOSEN = ("micro_batch", "schedule", "virtual_stages", "stages", "zero", "recompute", "sequence_parallel", "offload")
"""Fields that a plan and a run's configuration have in common under one name, beside the mesh and attention's way over
context."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a search chooses, each as in RunConfig. Hashable; nothing is checked here: sharding.mesh.check refuses a
    plan that model and batch cannot be divided over."""

    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    """Devices along each mesh axis."""
    micro_batch: int = 1
    """Sequences that a device runs at once."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    virtual_stages: int = 1
    stages: str = "auto"
    zero: Literal[0, 1, 2, 3] = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    offload: Literal["none", "optimizer"] = "none"
    context_attention: Literal["ring", "gather"] = "gather"
    hardware: str = "h100"
    """Name in the table of hardware, or the path of a hardware file."""

    @property
    def sizes(self) -> Sizes:
        """Devices along each of AXES."""
        return {"pipe": self.pipe, "data": self.data, "fsdp": self.fsdp, "context": self.context, "tensor": self.tensor}

    @property
    def devices(self) -> int:
        return self.pipe * self.data * self.fsdp * self.context * self.tensor

    @property
    def replicas(self) -> int:
        """Parts into which the global batch is split."""
        return self.data * self.fsdp

    def microbatches(self, global_batch: int) -> int:
        """Microbatches of a step."""
        return global_batch // (self.replicas * self.micro_batch)

    def parts(self, layers: int) -> list[int]:
        """Layers of each part of a model of so many (pipeline.placement)."""
        if self.stages != "auto":
            return [int(each) for each in self.stages.split(",")]
        short, longer = divmod(layers, parts := self.pipe * self.virtual_stages)
        return [short] * (parts - longer) + [short + 1] * longer

    def longest(self, layers: int) -> int:
        """Layers of the longest of them."""
        if self.stages != "auto":
            return max(self.parts(layers))
        return -(-layers // (self.pipe * self.virtual_stages))

    def repeated(self, layers: int) -> float:
        """Share of a model's layers that compute again, of whatever kind."""
        said = recomputation(self.recompute)
        if said.layers is None:
            return float(said.kind != "none")
        return sum(map(said.of, self.parts(layers))) / layers

    @staticmethod
    def of(config: RunConfig, sizes: Sizes, hardware: str) -> "Plan":
        """The plan that a run's configuration says on a mesh of these sizes; the microbatch is what it would take."""
        said = config.context_attention
        form = ("gather" if sizes["pipe"] > 1 else "ring") if said == "auto" else said
        chosen: dict[str, Any] = {name: getattr(config, name) for name in CHOSEN}
        chosen |= {axis: sizes[axis] for axis in AXES} | {"micro_batch": micro_batch(config, sizes)}
        return Plan(**chosen, context_attention=form, hardware=hardware)

    def apply(self, config: RunConfig) -> RunConfig:
        """The configuration with this plan in place of its own mesh and all that a plan says."""
        chosen = {name: getattr(self, name) for name in CHOSEN} | {"schedule_file": ""}
        form = self.context_attention if self.context > 1 else "auto"
        return dataclasses.replace(config, mesh=format_mesh(self.sizes), context_attention=form, **chosen)

    def to_json(self) -> dict[str, Any]:
        """Every choice by name, the mesh as the text of --mesh."""
        chosen = {name: getattr(self, name) for name in (*CHOSEN, "context_attention", "hardware")}
        return {"mesh": format_mesh(self.sizes), **chosen}

    @staticmethod
    def from_json(fields: Mapping[str, Any], name: str) -> "Plan":
        """Reads what to_json made; other fields, such as predictions beside the choices, are left alone.

        Raises UserError, naming the file, where a choice is missing or is not what it may be.
        """
        known = ("mesh", *CHOSEN, "context_attention", "hardware")
        fields = {"offload": "none", **fields}  # which plans did not say before there was any
        lacking = [each for each in known if each not in fields]
        if lacking:
            raise UserError(f"{name}: not a plan of jaxgpt (without {', '.join(lacking)}); save one with jaxgpt plan")
        chosen = {each: fields[each] for each in known[1:]}
        try:
            check_types(Plan, chosen)
            recomputation(chosen["recompute"])
            if not isinstance(fields["mesh"], str):
                raise UserError(f"mesh {json.dumps(fields['mesh'])}: must be a text")
            axes: dict[str, Any] = {**parse(fields["mesh"])}
            return Plan(**chosen, **axes)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest device, by kind, at the time of the step's peak."""

    parameters: int
    """fp32 masters, and the weights in the type of computation made from them."""
    gradients: int
    """Accumulated, and where they are reduced into another form, both."""
    optimizer: int
    """Moments."""
    activations: int
    """Kept from forward to backward: residuals of all microbatches that are held."""
    logits: int
    """A chunk of logits, and what is made of it."""
    buffers: int
    """All else: what a block computes with, weights gathered for it, rings of messages, tokens."""

    @property
    def peak(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds of a step, by part; they add up to it."""

    computation: float
    """Matrix products, attention and element-wise work of a stage's own microbatches, recomputation included."""
    exposed: Mapping[str, float]
    """By mesh axis: communication during which nothing is computed."""
    bubble: float
    """A pipeline's idle time."""
    optimizer: float
    """The update, and the norm of the gradient."""
    offload: float = 0.0
    """Reading the state from the host's memory, and writing it there."""

    @property
    def step(self) -> float:
        """The whole step."""
        return self.computation + sum(self.exposed.values()) + self.bubble + self.optimizer + self.offload


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is predicted of a plan."""

    plan: Plan
    model: ModelConfig
    global_batch: int
    memory: Memory
    time: Time
    peak_flops: float
    """FLOP/s of one device in the type of computation, as its vendor states."""
    capacity: int
    """Bytes of one device that a program may use."""
    host_bytes: int
    """Of the host's memory, for one device."""
    model_flops: float
    """Of a step, over all devices; recomputation not counted (planner.flops)."""
    hardware_flops: float
    """The same with what is recomputed."""
    fits: bool
    """Whether the peak, with the model's margin, is below the capacity."""

    @property
    def step_seconds(self) -> float:
        return self.time.step

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.global_batch * self.model.seq / self.time.step

    @property
    def model_tflops(self) -> float:
        """Model TFLOP/s of one device."""
        return self.model_flops / (self.time.step * self.plan.devices) / 1e12

    @property
    def hardware_tflops(self) -> float:
        """Hardware TFLOP/s of one device: recomputed work counts."""
        return self.hardware_flops / (self.time.step * self.plan.devices) / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs / (time x peak x devices)."""
        return self.model_tflops * 1e12 / self.peak_flops

    @property
    def hfu(self) -> float:
        """Hardware FLOPs / (time x peak x devices)."""
        return self.hardware_tflops * 1e12 / self.peak_flops

    def days(self, tokens: float | int) -> float:
        """Days that training on so many tokens takes."""
        return tokens / self.tokens_per_second / 86400

    def to_json(self) -> dict[str, Any]:
        """The plan's choices, and every prediction, as numbers: memory in bytes by kind, time in seconds by part."""
        return {
            **self.plan.to_json(),
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "model_tflops_per_device": self.model_tflops,
            "hardware_tflops_per_device": self.hardware_tflops,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity,
            "host_bytes": self.host_bytes,
            "fits": self.fits,
            "memory": dataclasses.asdict(self.memory),
            "time": {
                "computation": self.time.computation,
                **{f"exposed {axis}": seconds for axis, seconds in self.time.exposed.items()},
                "bubble": self.time.bubble,
                "optimizer": self.time.optimizer,
                **({"offload": self.time.offload} if self.time.offload else {}),
            },
        }
