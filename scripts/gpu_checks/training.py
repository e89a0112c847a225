"""Stages that train the embedded task by the real command: end to end, and killed and resumed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_checks.common import MARKER, ROOT, Context, Failed, Outcome, Record, kill_all, last_error, run_command

AGREEMENT = 0.03
"""Largest mean distance between the log-probabilities of engine and trainer in any step, nats."""

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
    from transformers import AutoModelForCausalLM

    steps = 2 if context.toy else 8
    overrides = overrides_of(context, f"trainer.total_training_steps={steps}", f"trainer.test_freq={steps}")
    records = train_run(context, "run", overrides)
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
    from verl.checkpoint.folders import checkpoints

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
