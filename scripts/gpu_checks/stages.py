"""The stages of scripts/check_gpu.py, in the order in which they run: what tells most comes first."""

from typing import NamedTuple


class Stage(NamedTuple):
    """One check."""

    name: str
    what: str
    function: str
    """Module and function of this package, a string: listing the stages must not import torch, which may be what is
    missing."""
    to_do: str
    """What a user does if it fails, unless the failure knows better."""


TESTS = "testing:tests"

STAGES = (
    Stage(
        "versions",
        "packages, GPU, compiler, sleep support",
        "machine:versions",
        "install what requirements.txt lists (README.md, Install), and free the GPU",
    ),
    Stage(
        "sleep",
        "vLLM's sleep, with captured states before and after",
        TESTS,
        "train with rollout.free_cache_engine=false",
    ),
    Stage(
        "sync",
        "engine and policy take turns: sleep, weights, log-probabilities",
        TESTS,
        "train with rollout.free_cache_engine=false; if only [vllm] failed, rollout.name=hf works",
    ),
    Stage(
        "offload",
        "parameters and optimizer wait in page-locked memory",
        TESTS,
        "train with model.fsdp.param_offload=false and model.fsdp.optimizer_offload=false",
    ),
    Stage(
        "attention",
        "packed rows through the attention kernels",
        TESTS,
        "train with model.use_remove_padding=false, or another model.attn_implementation than the one that failed",
    ),
    Stage(
        "train",
        "the embedded task end to end; engine and trainer agree in every step",
        "training:train",
        "try rollout.enforce_eager=true, then rollout.dtype=float32, then rollout.name=hf, to see which one matters",
    ),
    Stage(
        "resume",
        "a run that is killed goes on as if nothing had happened",
        "training:resume",
        "compare the metrics.jsonl of alone/ and killed/; try trainer.async_save=false",
    ),
    Stage(
        "capture",
        "hidden states with CUDA graphs on four architectures",
        TESTS,
        "train with rollout.enforce_eager=true, or calculator.source=actor",
    ),
    Stage(
        "capture-second-runner",
        "the same with vLLM's second model runner",
        TESTS,
        "nothing for training, which uses the first; elsewhere set VLLM_USE_V2_MODEL_RUNNER=0",
    ),
    Stage("streams", "draws do not depend on the batch", TESTS, "train with rollout.seeded=false"),
    Stage(
        "step-packed",
        "whole steps of 1.5B parameters, rows packed; memory against the estimate",
        "scale:whole_steps",
        "out of memory: lower actor.ppo_max_token_len_per_gpu (docs/memory.md); else model.use_remove_padding=false",
    ),
    Stage(
        "step-padded",
        "the same, rows padded",
        "scale:whole_steps",
        "out of memory: lower actor.micro_batch_size_per_gpu (docs/memory.md)",
    ),
    Stage(
        "capture-cost",
        "decoding speed with capture against that without",
        "measuring:capture_cost",
        "train with calculator.source=actor, or bear the cost; own_share in the JSON says how much is the plugin's",
    ),
    Stage(
        "spectra",
        "time and accuracy of ranks at 1.5k, 4k and 8k tokens",
        "measuring:spectra",
        "out of memory: free the GPU; otherwise do not trust ranks from this machine",
    ),
    Stage(
        "spectra-agree", "ranks on this device against those on a CPU", TESTS, "do not trust ranks from this machine"
    ),
    Stage(
        "sampler",
        "streams against seeded and unseeded sampling",
        "measuring:sampler",
        "train with rollout.seeded=false",
    ),
    Stage(
        "tensor-parallel",
        "one engine on two GPUs, weights given over NCCL",
        "scale:tensor_parallel",
        "train with rollout.tensor_parallel_size=1; run it with NCCL_DEBUG=INFO to see what NCCL does",
    ),
    Stage(
        "sharding",
        "the policy sharded over the GPUs, and copies of it in groups of them (HSDP)",
        "scale:sharding",
        "train with model.fsdp.fsdp_size=-1; run it with NCCL_DEBUG=INFO to see what NCCL does",
    ),
)
