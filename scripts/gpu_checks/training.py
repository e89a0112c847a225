"""The stages that train by the real command: the embedded task end to end, killed and resumed, and a random model of
1.5B parameters; its memory, tensor parallelism and FSDP."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from shapes import SHAPES, make_model
from transformers import AutoConfig, AutoModelForCausalLM

from gpu_checks.common import (
    GB,
    MARKER,
    ROOT,
    Context,
    Failed,
    Outcome,
    Record,
    Skipped,
    kill_all,
    last_error,
    run_command,
)
from verl.checkpoint.folders import checkpoints
from verl.config import PPOConfig, load_config
from verl.run.memory import estimate

AGREEMENT = 0.005
"""Bound of the mean distance between the log-probabilities of engine and trainer in any step, in nats. On a CPU it is
0.0009 in bfloat16."""

UNTRAINED = 0.45
"""pass@1 of the embedded model before it is trained is 0.61; less than this, and the engine computes something else."""

TOY_SIZES = [
    *("data.train_batch_size=4", "actor.ppo_mini_batch_size=2", "rollout.n=4", "data.val_sample_size=32"),
    "rollout.kv_cache_memory_mb=64",
]
QUIET_RUN = ["trainer.report_freq=-1", "trainer.max_restarts=0", "trainer.samples.freq=0"]


def overrides_of(context: Context, *more: str, workers: int = 1) -> list[str]:
    """Arguments of a training: the embedded task on one GPU, smaller if it is a toy."""
    sizes = TOY_SIZES if context.toy else ["rollout.gpu_memory_utilization=0.3"]
    return [f"device={context.device}", f"trainer.n_gpus_per_node={workers}", *QUIET_RUN, *sizes, *more]


def train_run(context: Context, name: str, overrides: Sequence[str]) -> list[Record]:
    """Train by the real command; the records of all steps, validation before the first included."""
    folder = context.out / name
    arguments = ["-m", "verl.trainer.main_ppo", *overrides, f"trainer.default_local_dir={folder}"]
    run_command(arguments, context.out / f"{name}.log")
    return records_of(folder)


def records_of(folder: Path) -> list[Record]:
    """The complete lines of a run's metrics."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def agreement(records: Sequence[Record], num_steps: int, limit: float = AGREEMENT) -> Record:
    """Distances of engine and trainer in the steps 1 to ``num_steps``, below ``limit`` nats in the mean of each.

    Raises:
        Failed: a step is missing, or its mean distance is too large.
    """
    steps = {record["step"]: record for record in records if record["step"] > 0}
    if list(steps) != list(range(1, num_steps + 1)):
        raise Failed(f"metrics.jsonl holds the steps {list(steps)}, not 1 to {num_steps}")
    means = [steps[step].get("rollout/logprob_abs_diff", float("nan")) for step in steps]
    figures = {
        "logprob_abs_diff": means,
        "logprob_abs_diff_max": max(record["rollout/logprob_abs_diff_max"] for record in steps.values()),
        "step_s": [record["timing_s/step"] for record in steps.values()],
    }
    for step, value in zip(steps, means, strict=True):
        # Not the other way round: NaN must fail.
        if not value < limit:
            reason = f"step {step}: engine and trainer differ by {value:.3g} nats, not below {limit}"
            raise Failed(reason, figures)
    return figures


def train(context: Context) -> Outcome:
    """The embedded task end to end: validation, steps, agreement, and a model at the end that loads."""
    steps = 2 if context.toy else 8
    dtype = "bfloat16" if context.stage == "train-bfloat16" else "float32"
    overrides = overrides_of(context, f"trainer.total_training_steps={steps}", f"trainer.test_freq={steps}")
    records = train_run(context, "run", [*overrides, f"model.param_dtype={dtype}"])
    figures = agreement(records, steps)
    figures["pass_at_1"] = [record["val/pass@1"] for record in records if "val/pass@1" in record]
    if len(figures["pass_at_1"]) != 2 or not figures["pass_at_1"][0] > UNTRAINED:
        raise Failed(f"pass@1 is {figures['pass_at_1']}; before training it is 0.61 elsewhere", figures)
    if not any(record["actor/grad_norm"] > 0 for record in records if record["step"]):
        raise Failed("the gradient was 0 in all steps", figures)
    AutoModelForCausalLM.from_pretrained(context.out / "run" / f"global_step_{steps}" / "actor" / "huggingface")
    before, after = figures["pass_at_1"]
    last = figures["step_s"][-1]
    worst = max(figures["logprob_abs_diff"])
    return Outcome(f"{steps} steps, {last:.1f} s the last; engine and trainer differ by {worst:.1e} nats; "
                   f"pass@1 {before:.0%} -> {after:.0%}", figures)  # fmt: skip


TIMING = ("timing_s/", "perf/")
EXACT_ON_GPU = ("actor/lr", "prompt_length/mean", "prompt_length/max")
"""What a GPU, whose kernels add in no fixed order, must give to the bit: schedule and order of the data."""
LOOSE_ON_GPU = 0.3
"""Largest difference of the mean score and, relatively, of the mean length there."""


def resume(context: Context) -> Outcome:
    """A run killed after its second checkpoint goes on by the same command, and ends as one that was left alone."""
    steps = 4
    overrides = overrides_of(
        context,
        *(f"trainer.total_training_steps={steps}", "trainer.save_freq=1", "trainer.save_hf_model=false"),
        *("trainer.val_before_train=false", "trainer.test_freq=0", "trainer.deterministic=true"),
    )
    alone = train_run(context, "alone", overrides)
    killed_after = kill_midway(context, overrides)
    again = train_run(context, "killed", overrides)
    if "resuming from" not in (context.out / "killed.log").read_text():
        raise Failed("the second run did not resume: it began at step 1")
    return compare_runs(alone, again, context.on_gpu, killed_after)


def kill_midway(context: Context, overrides: Sequence[str]) -> int:
    """Start a run and kill it with all its processes when two checkpoints are complete; the last one's step."""
    folder = context.out / "killed"
    identity = f"{os.environ.get(MARKER, 'alone')}-killed"
    with (context.out / "killed.first.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, f"trainer.default_local_dir={folder}"],
            cwd=ROOT,
            # A name apart within the stage's, so that the stage itself lives on.
            env=os.environ | {f"{MARKER}_RUN": identity},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while len(checkpoints(folder)) < 2:
            if process.poll() is not None:
                log = context.out / "killed.first.log"
                raise Failed(f"the run to be killed ended by itself with {process.returncode}: {last_error(log)}")
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
        kill_all(f"{MARKER}_RUN", identity)
    return max(checkpoints(folder))


def compare_runs(alone: Sequence[Record], again: Sequence[Record], on_gpu: bool, killed_after: int) -> Outcome:
    """Both runs have the same steps, with the same numbers where the device gives the same numbers."""
    if [record["step"] for record in alone] != [record["step"] for record in again]:
        raise Failed(f"steps {[r['step'] for r in alone]} without, {[r['step'] for r in again]} with the kill")
    names = [name for name in alone[-1] if not name.startswith(TIMING)]
    different = sorted({n for one, two in zip(alone, again, strict=True) for n in names if one.get(n) != two.get(n)})
    figures: Record = {"killed_after_step": killed_after, "metrics": len(names), "different": different}
    wrong = [name for name in different if not on_gpu or name in EXACT_ON_GPU]
    if on_gpu:
        for one, two in zip(alone, again, strict=True):
            score = abs(one["critic/score/mean"] - two["critic/score/mean"])
            length = abs(two["response_length/mean"] / one["response_length/mean"] - 1)
            wrong += [f"scores by {score:.2f}"] if score > LOOSE_ON_GPU else []
            wrong += [f"lengths by {length:.0%}"] if length > LOOSE_ON_GPU else []
    if wrong:
        raise Failed(f"after a kill at step {killed_after} the runs differ: {', '.join(wrong[:3])}", figures)
    same = len(names) - len(different)
    return Outcome(f"killed after step {killed_after}, {same} of {len(names)} metrics the same to the bit", figures)


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
"""Smallest ratio of the largest phases, on a GPU: below, the estimate would warn of runs that fit."""
LIBRARIES_GB = {"cuda": 1.0, "cpu": 3.0}
"""What the estimate does not know: a GPU's allocator, and in a CPU's resident memory the libraries."""

RANDOM_AGREEMENT = 0.1
"""As ``AGREEMENT``, for a model of 28 random layers: in bfloat16 its log-probabilities are 0.018 off those in
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
    overrides += ["preset=embedded", f"model.path={context.out / 'model'}"]
    overrides += [f"rollout.stop_token_ids={[*range(1000, 1000 + stops)]}"]
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
    shape = AutoConfig.from_pretrained(config.model.path)
    phases = estimate(config, total, {"model": shape})
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
