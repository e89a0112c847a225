"""Stages at the size of real models and on several GPUs: whole steps with their memory, tensor parallelism, FSDP."""

import torch
from bench_hidden_states import SHAPES
from bench_shaping import make_model
from transformers import AutoConfig

from gpu_checks.common import GB, Context, Failed, Outcome, Record, Skipped
from gpu_checks.training import agreement, overrides_of, train_run
from verl.config import PPOConfig, load_config
from verl.run.memory import Shape, estimate

PHASES = {
    "gen": ["generate"],
    "old_log_prob": ["logprobs"],
    "update_actor": ["update, backward", "update, step"],
    "update_weights": ["sync"],
}
"""Phase of ``perf/memory`` -> phases of the estimate, of which the larger counts."""

OVER = 1.25
"""Largest ratio of measured memory to the estimate of a phase."""
UNDER = 0.5
"""Smallest ratio of the largest phases, on a GPU: below, the estimate would turn away runs that fit."""
LIBRARIES_GB = {"cuda": 1.0, "cpu": 3.0}
"""What the estimate does not know: a GPU's allocator, and in a CPU's resident memory the libraries."""

RANDOM_AGREEMENT = 0.1
"""As ``training.AGREEMENT``, for a model of 28 random layers: in bfloat16 its log-probabilities are 0.018 off those in
float32, each time in another way, and those of other weights 0.9."""

MEAN_LENGTH_SHARE = 2
"""Responses may be this many times as long as they are in the mean."""


def whole_steps(context: Context) -> Outcome:
    """Steps of a random model of 1.5B parameters, with responses of many lengths; peak memory against the estimate."""
    name, length, steps = ("20m", 48, 2) if context.toy else ("1.5b", 1024, 3)
    make_model(name, context.out / "model")
    # A random model samples evenly, so that one of these ends a response after a geometric number of tokens.
    stops = SHAPES[name]["vocab_size"] * MEAN_LENGTH_SHARE // length
    overrides = [*overrides_of(context), *sizes_of(context, length), f"trainer.total_training_steps={steps}"]
    overrides += [f"model.path={context.out / 'model'}", f"rollout.stop_token_ids={[*range(1000, 1000 + stops)]}"]
    if context.stage == "step-packed":
        tokens = 4 * (32 + length)
        overrides += ["model.use_remove_padding=true", "actor.use_dynamic_bsz=true"]
        overrides += [f"actor.ppo_max_token_len_per_gpu={tokens}"]
    records = train_run(context, "run", [item.replace(" ", "") for item in overrides])
    figures = agreement(records, steps, RANDOM_AGREEMENT)
    figures |= memory(context, overrides, records)
    mean = records[-1]["response_length/mean"]
    figures["tokens_per_response"] = mean
    if not 0.2 * length < mean < 0.9 * length:
        raise Failed(f"responses have {mean:.0f} tokens in the mean; of {length} at most, half was expected", figures)
    check_memory(context, figures)
    peak, expected = max(figures["measured_gb"].values()), max(figures["estimated_gb"].values())
    text = f"{min(figures['step_s']):.1f} s a step of {mean:.0f} tokens a response; "
    return Outcome(text + f"at most {peak:.1f} GB, {expected:.1f} estimated", figures)


def sizes_of(context: Context, length: int) -> list[str]:
    """Options that make the two kinds of rows, and the estimate, comparable."""
    if context.toy:
        # The engine's own dtype, for the estimate, which takes `auto` for bfloat16.
        sizes = ["actor.micro_batch_size_per_gpu=4", "actor.ppo_mini_batch_size=4", "rollout.dtype=float32"]
    else:
        sizes = ["data.train_batch_size=16", "rollout.n=8", "actor.micro_batch_size_per_gpu=4"]
        sizes += ["actor.ppo_mini_batch_size=16", "model.param_dtype=bfloat16", "model.gradient_checkpointing=true"]
        sizes += ["rollout.kv_cache_memory_mb=8192"]
    return [
        *sizes,
        f"data.max_response_length={length}",
        *("trainer.val_before_train=false", "trainer.test_freq=0", "trainer.save_freq=0", "actor.optim.lr=1e-6"),
        *("trainer.save_hf_model=false", "calculator.diff_stride=8"),
        # torch counts what a sleeping engine has given back; one that stays awake is counted in both.
        "rollout.free_cache_engine=false",
    ]


def memory(context: Context, overrides: list[str], records: list[Record]) -> Record:
    """Peak of each phase, measured and estimated, in GB."""
    config = load_config(PPOConfig, "ppo_trainer", [item.replace(" ", "") for item in overrides])
    total = torch.cuda.get_device_properties(0).total_memory / GB if context.on_gpu else 80.0
    phases = estimate(config, Shape.of(AutoConfig.from_pretrained(config.model.path)), total)
    # CUDA's context is not among what torch allocates.
    sums = {name: sum(parts.values()) - parts["context"] for name, parts in phases.items()}
    names = [name for name in PHASES if any(f"perf/memory/{name}_gb" in record for record in records)]
    return {
        "measured_gb": {name: max(r.get(f"perf/memory/{name}_gb", 0.0) for r in records) for name in names},
        "estimated_gb": {name: max(sums[phase] for phase in PHASES[name]) for name in names},
    }


def check_memory(context: Context, figures: Record) -> None:
    """Whether the estimate holds.

    Raises:
        Failed: a phase took much more, or the largest much less.
    """
    measured, estimated = figures["measured_gb"], figures["estimated_gb"]
    if missing := {"gen", "update_actor", "update_weights"} - set(measured):
        raise Failed(f"no memory was measured in {', '.join(sorted(missing))}", figures)
    for name, value in measured.items():
        if not 0 < value <= OVER * estimated[name] + LIBRARIES_GB[context.device]:
            reason = f"{name} took {value:.2f} GB, {estimated[name]:.2f} were estimated"
            to_do = "leave that much more room than scripts/estimate_memory.py says, by a lower gpu_memory_utilization"
            raise Failed(reason, figures, to_do)
    if context.on_gpu and max(measured.values()) < UNDER * max(estimated.values()):
        reason = f"at most {max(measured.values()):.2f} GB were taken, {max(estimated.values()):.2f} estimated"
        raise Failed(reason, figures, "larger batches fit than scripts/estimate_memory.py says; report it")


def gpus(context: Context) -> int:
    """How many GPUs to use, an even number; on a CPU two workers.

    Raises:
        Skipped: there is one.
    """
    count = torch.cuda.device_count() if context.on_gpu else 2
    if count < 2:
        raise Skipped("one GPU here; this needs two")
    return count // 2 * 2


FEW_STEPS = [
    *("trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=0"),
    # Large enough that an engine with old weights would show.
    *("trainer.save_freq=0", "trainer.save_hf_model=false", "actor.optim.lr=1e-3", "actor.optim.lr_warmup_steps=0"),
]


def tensor_parallel(context: Context) -> Outcome:
    """One engine on two devices, which gets the sharded policy's weights after each step."""
    gpus(context)
    overrides = overrides_of(context, *FEW_STEPS, "rollout.tensor_parallel_size=2", workers=2)
    figures = agreement(train_run(context, "run", overrides), 2)
    worst = max(figures["logprob_abs_diff"])
    return Outcome(f"an engine on two devices follows the policy to {worst:.1e} nats", figures)


def sharding(context: Context) -> Outcome:
    """The gradient of the first step does not depend on how the policy is sharded."""
    count = gpus(context)
    figures: Record = {"workers": count}
    for name, size in (("fsdp", -1), ("hsdp", count // 2)):
        # The same requests to the same engines, so that both sample the same tokens, on a GPU too.
        options = [*FEW_STEPS, f"model.fsdp.fsdp_size={size}", "trainer.deterministic=true"]
        overrides = overrides_of(context, *options, workers=count)
        # One update a step: a second one would start from weights that Adam may already have moved apart.
        size_of_batch = 4 if context.toy else 48
        overrides += [f"data.train_batch_size={size_of_batch}", f"actor.ppo_mini_batch_size={size_of_batch}"]
        records = train_run(context, name, overrides)
        figures[name] = agreement(records, 2) | {"grad_norm": records[0]["actor/grad_norm"]}
    one, other = (figures[name]["grad_norm"] for name in ("fsdp", "hsdp"))
    # Should a GPU's kernels not repeat themselves to the bit, a few tokens are others.
    if not abs(other / one - 1) < (0.1 if context.on_gpu else 1e-3):
        raise Failed(f"norm of the first gradient: {one:.6g} sharded over all, {other:.6g} with copies", figures)
    return Outcome(f"{count} workers: gradient norm {one:.5g} with FSDP, {other:.5g} with HSDP", figures)
