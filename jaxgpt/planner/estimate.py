"""What is predicted of a plan: time and memory, and whether it fits.

    estimate(model, plan, find("h100"), global_batch=512)

A call takes some ten microseconds to a hundred, so that a search can ask for every legal plan.
"""

from jaxgpt.config import ModelConfig
from jaxgpt.planner.cost import costs
from jaxgpt.planner.flops import recomputed_per_token
from jaxgpt.planner.hardware import Dtype, Hardware
from jaxgpt.planner.memory import fits, host_memory, peak_memory
from jaxgpt.planner.plan import Estimate, Plan
from jaxgpt.planner.practice import JAXGPT, Practice
from jaxgpt.planner.step import step_time
from jaxgpt.recomputation import recomputation


def estimate(
    model: ModelConfig,
    plan: Plan,
    hardware: Hardware,
    global_batch: int,
    practice: Practice = JAXGPT,
    dtype: Dtype = "bf16",
) -> Estimate:
    """Time and memory of a step of a plan that model and batch can be divided over (sharding.mesh.check says so).

    practice: the program that runs it; dtype: of computation. FLOPs are flops_per_token's, causal attention as it is
    computed, and recomputation's as jaxgpt does it.
    """
    found = costs(model, hardware, practice, dtype)
    memory = peak_memory(found, plan, global_batch)
    tokens = global_batch * model.seq
    flops = tokens * found.flops_per_token
    again = plan.repeated(model.layers) * recomputed_per_token(model, recomputation(plan.recompute).kind)
    return Estimate(
        plan=plan,
        model=model,
        global_batch=global_batch,
        memory=memory,
        time=step_time(found, plan, global_batch),
        peak_flops=hardware.peak(dtype),
        capacity=hardware.memory,
        host_bytes=host_memory(found, plan),
        model_flops=flops,
        hardware_flops=flops + tokens * again,
        fits=fits(memory.peak, hardware) and host_memory(found, plan) <= hardware.offload.memory,
    )
