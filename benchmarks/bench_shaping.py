"""Measure what rank shaping costs: time per step of GRPO against VERL-GRPO on the same prompts and responses.

python benchmarks/bench_shaping.py --out benchmarks/shaping_cpu                  # the embedded task, on a CPU
python benchmarks/bench_shaping.py --out benchmarks/shaping_h100 --device cuda   # a random model of 1.5B parameters

Both are the real trainer with its own workers. Only rank shaping differs: GRPO captures no hidden states and computes
no metrics. The learning rate is so small that no weight moves, and the end-of-turn token does not end a response, so
both sample the same --tokens tokens in every step. On a CPU both trainers run side by side and take turns, step by step
and in random order, so a drift of the machine's speed affects both alike. A GPU holds one engine: there, runs of GRPO,
VERL-GRPO, VERL-GRPO and GRPO follow each other. The cost is the median over pairs of steps of the ratio of their times.

Writes OUT.jsonl (how it was made, then each pair of steps) and OUT.md.
"""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from bench_hidden_states import SHAPES
from bench_report import provenance, write_report
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from verl.config import PPOConfig, load_config
from verl.data.prompts import PromptDataset, train_loader
from verl.models.tokenizer import load_tokenizer
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rewards.pool import VerifierPool
from verl.rollout import engine_environment
from verl.run.display import RunDisplay
from verl.run.samples import SampleStore
from verl.run.session import TrainingRun
from verl.run.tracking import Tracker
from verl.single_controller.cluster import ray_cluster, resolve_device
from verl.single_controller.worker_group import WorkerGroup
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.samples import SampleKeeper
from verl.trainer.ppo.sampling import Sampler

ROOT = Path(__file__).resolve().parents[1]

BASELINE, SHAPED = "GRPO", "VERL-GRPO"
VARIANTS = {BASELINE: ["experiment=grpo", "calculator.enable=false"], SHAPED: ["experiment=verl_grpo"]}

WORKER = "timed_worker:TimedWorker"
"""In this folder."""

CAPTURE, REDUCE, CPU = "capture", "reduce", "cpu"
"""What a worker reports of its time: the plugin's parts, and the CPU time of its process."""


class Finished(Exception):
    """The trainer gets no more turns."""


class GatedSampler(Sampler):
    """Starts a step only when it is its trainer's turn. A step lasts from one start to the next."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turns, self._rests = threading.Semaphore(0), threading.Semaphore(0)
        self._over = False

    def sample_step(self, *arguments: Any) -> Any:
        """Wait for a turn, then sample."""
        self.rest()
        self._turns.acquire()
        if self._over:
            raise Finished
        return super().sample_step(*arguments)

    def rest(self) -> None:
        """Say that the trainer is idle."""
        self._rests.release()

    def wait(self) -> None:
        """Wait until the trainer is idle."""
        self._rests.acquire()

    def give_turn(self, last: bool = False) -> None:
        """Let one step start; with ``last``, end the training instead."""
        self._over = last
        self._turns.release()


class Quiet(RunDisplay):
    """Prints nothing."""

    def say(self, text: str) -> None:
        """Print nothing."""


class Contestant:
    """A trainer in its own thread."""

    def __init__(self, name: str, config: PPOConfig, device_type: str, stack: ExitStack) -> None:
        trainer = config.trainer
        paths = filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        environment = engine_environment(device_type) | {"PYTHONPATH": os.pathsep.join(paths)}
        self.folder = Path(trainer.default_local_dir)
        self.workers = WorkerGroup(
            WORKER,
            *(
                config,
                (trainer.total_training_steps, config.rollout.stop),
                1,
                trainer.n_gpus_per_node,
                device_type,
                environment,
            ),
        )
        stack.callback(self.workers.close)
        tokenizer = load_tokenizer(config.model.path, False)
        data = config.data
        train_set = PromptDataset(data.train_files, tokenizer, data)
        loader = train_loader(train_set, data, tokenizer.pad_token_id, config.seed)
        verifiers = stack.enter_context(VerifierPool(config.reward_score))
        self.sampler = GatedSampler(config, tokenizer, None, self.workers, verifiers, config.rollout.stop)
        calculator = RepresentationMetricsCalculator(config.calculator) if config.calculator.enable else None
        tracker = Tracker(self.folder, [], trainer.project_name, name, config)
        stack.callback(tracker.close)
        run = TrainingRun(config, trainer.total_training_steps, {}, device_type)
        run.display = Quiet(name, trainer.total_training_steps, {})
        store = stack.enter_context(SampleStore(run.folder, trainer.samples, run.attempt, run.display.say))
        samples = SampleKeeper(store, 0, tokenizer, tracker, run.display)
        parts = (self.workers, self.sampler, calculator, tracker, samples, run)
        self._trainer = RayPPOTrainer(config, loader, [], *parts)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()
        self._wait()

    def step(self) -> dict[str, Any]:
        """One step: its seconds, the plugin's part of them, phases and lengths."""
        self.workers.run("take_spent")
        start, computed = time.perf_counter(), time.process_time()
        self.sampler.give_turn()
        self._wait()
        seconds, computed = time.perf_counter() - start, time.process_time() - computed
        record = json.loads((self.folder / "metrics.jsonl").read_text().splitlines()[-1])
        spent = self.workers.run("take_spent")
        return {
            "seconds": seconds,
            "cpu_seconds": computed + sum(worker[CPU] for worker in spent),
            "tokens": record["perf/generated_tokens"],
            "shortest": record["response_length/min"],
            "plugin": {key: max(worker[key] for worker in spent) for key in (CAPTURE, REDUCE)},
            "phases": {n.removeprefix("timing_s/"): s for n, s in record.items() if n.startswith("timing_s/")},
        }

    def end(self) -> None:
        """End the training."""
        self.sampler.give_turn(last=True)
        self._thread.join()

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except Finished:
            return
        except BaseException as error:
            self._error = error
            self.sampler.rest()

    def _wait(self) -> None:
        self.sampler.wait()
        if self._error is not None:
            raise self._error


def side_by_side(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """Pairs of steps of two trainers that take turns."""
    with ExitStack() as stack:
        contestants = {name: contestant(name, name, options, folder, stack) for name in VARIANTS}
        for index in range(options.warm_up + options.pairs):
            order = list(contestants)
            random.Random(index).shuffle(order)
            pair = {name: contestants[name].step() for name in order}
            if index >= options.warm_up:
                yield pair
        for one in contestants.values():
            one.end()


def one_after_another(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """Pairs of steps with the same number, from runs that follow each other."""
    half = math.ceil(options.pairs / 2)
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in VARIANTS}
    for index, name in enumerate([BASELINE, SHAPED, SHAPED, BASELINE]):
        with ExitStack() as stack:
            one = contestant(name, f"{name}-{index}", options, folder, stack)
            runs[name].append([one.step() for _ in range(options.warm_up + half)][options.warm_up :])
            one.end()
    for first, second in zip(runs[BASELINE], runs[SHAPED], strict=True):
        for a, b in zip(first, second, strict=True):
            yield {BASELINE: a, SHAPED: b}


def contestant(name: str, folder_name: str, options: argparse.Namespace, folder: Path, stack: ExitStack) -> Contestant:
    """Start one of ``VARIANTS``."""
    print(f"starting {name}", file=sys.stderr, flush=True)
    steps = options.warm_up + options.pairs + 1
    overrides = [
        f"model.path={folder / 'model'}",
        f"model.param_dtype={'float32' if options.device == 'cpu' else 'bfloat16'}",
        f"data.train_files=[{ROOT / 'data/arithmetic/train.parquet'}]",
        "data.val_files=[]",
        f"data.train_batch_size={options.prompts}",
        f"data.max_response_length={options.tokens}",
        f"calculator.diff_stride={options.stride}",
        f"actor.ppo_mini_batch_size={options.prompts // 2}",
        f"actor.micro_batch_size_per_gpu={options.micro_batch}",
        "actor.optim.lr=1e-30",
        "actor.optim.lr_warmup_steps=0",
        f"rollout.n={options.samples}",
        f"rollout.gpu_memory_utilization={options.gpu_memory_utilization}",
        f"trainer.n_gpus_per_node={options.workers}",
        f"trainer.total_training_steps={steps}",
        f"trainer.total_epochs={steps}",
        f"trainer.default_local_dir={folder / folder_name}",
        f"device={options.device}",
    ]
    config = load_config(PPOConfig, "ppo_trainer", [*overrides, *VARIANTS[name], *options.overrides])
    return Contestant(name, config, options.device, stack)


def make_model(shape: str, folder: Path, embedded: Path = ROOT / "data" / "tiny_model") -> None:
    """The embedded model or one with random weights; a token that it never samples ends a response."""
    tokenizer = AutoTokenizer.from_pretrained(embedded)
    end = tokenizer.pad_token_id
    if shape == "embedded":
        shutil.copytree(embedded, folder)
        for name in ("config.json", "generation_config.json"):
            values = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(values | {"eos_token_id": end}))
    else:
        torch.manual_seed(0)
        config = Qwen2Config(**SHAPES[shape], max_position_embeddings=4096, eos_token_id=end, pad_token_id=end)
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.eos_token = tokenizer.pad_token
    tokenizer.save_pretrained(folder)


def median_interval(values: Sequence[float], outside: float = 0.05) -> tuple[float, float]:
    """Bounds of the median, wrong with probability at most ``outside`` for any distribution: the k-th smallest and k-th
    largest value, k from the binomial distribution; the extremes where there are too few values."""
    ordered, n = sorted(values), len(values)
    k, below = 0, 0.5**n
    while below <= outside / 2 and k < n // 2:
        k += 1
        below += math.comb(n, k) * 0.5**n
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]


def summarise(pairs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The figures of all pairs."""
    ratios = [pair[SHAPED]["seconds"] / pair[BASELINE]["seconds"] for pair in pairs]
    cpu_ratios = [pair[SHAPED]["cpu_seconds"] / pair[BASELINE]["cpu_seconds"] for pair in pairs]
    shaped_seconds = [pair[SHAPED]["seconds"] for pair in pairs]
    phases = sorted({phase for pair in pairs for step in pair.values() for phase in step["phases"]} - {"step"})

    def phase_median(name: str, phase: str) -> float:
        return statistics.median(pair[name]["phases"].get(phase, 0.0) for pair in pairs)

    return {
        "pairs": len(pairs),
        "seconds": {name: statistics.median(pair[name]["seconds"] for pair in pairs) for name in VARIANTS},
        "ratio": statistics.median(ratios),
        "interval": median_interval(ratios),
        "cpu_ratio": statistics.median(cpu_ratios),
        "cpu_interval": median_interval(cpu_ratios),
        "middle_half": statistics.quantiles(ratios, n=4)[::2],
        "ratio_of_sums": sum(shaped_seconds) / sum(pair[BASELINE]["seconds"] for pair in pairs),
        "plugin_share": {
            key: statistics.median(pair[SHAPED]["plugin"][key] / pair[SHAPED]["seconds"] for pair in pairs)
            for key in (CAPTURE, REDUCE)
        },
        "phases": {phase: {name: phase_median(name, phase) for name in VARIANTS} for phase in phases},
        "tokens": pairs[0][BASELINE]["tokens"],
        "shortest": min(step["shortest"] for pair in pairs for step in pair.values()),
        "same_tokens": all(pair[BASELINE]["tokens"] == pair[SHAPED]["tokens"] for pair in pairs),
    }


def page(facts: dict[str, Any], figures: dict[str, Any]) -> str:
    """The results as Markdown."""
    low, high = figures["interval"]
    first, third = figures["middle_half"]
    cpu_low, cpu_high = figures["cpu_interval"]
    share = figures["plugin_share"]
    lines = [
        "# What rank shaping costs",
        "",
        f"{facts['hardware']}, vLLM {facts['vllm']}, torch {facts['torch']}, {facts['date']}. {facts['what']}",
        "",
        "Regenerate with",
        "",
        f"    {facts['command']}",
        "",
        f"A step of VERL-GRPO takes **{figures['ratio']:.3f}** times as long as one of GRPO on the same prompts and",
        f"responses: median of {figures['pairs']} pairs of steps, 95% interval {low:.3f} to {high:.3f}, middle half "
        f"{first:.3f} to {third:.3f};",
        f"all steps together {figures['ratio_of_sums']:.3f}. In CPU time of workers and driver, on which other",
        f"processes have less influence: {figures['cpu_ratio']:.3f}, 95% interval {cpu_low:.3f} to {cpu_high:.3f}.",
        f"Responses have at least {figures['shortest']:.0f} tokens.",
        "",
        f"The plugin's own code takes {share[CAPTURE]:.1%} of a VERL-GRPO step to keep hidden states, and",
        f"{share[REDUCE]:.1%} to turn them into metrics. The driver's part is the phases `rank_metrics` and",
        "`adv`.",
        "",
        "| seconds, median | GRPO | VERL-GRPO |",
        "|---|---:|---:|",
        f"| step | {figures['seconds'][BASELINE]:.3f} | {figures['seconds'][SHAPED]:.3f} |",
    ]
    for phase, seconds in figures["phases"].items():
        lines.append(f"| {phase} | {seconds[BASELINE]:.3f} | {seconds[SHAPED]:.3f} |")
    return "\n".join([*lines, ""])


def describe(options: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """How the figures were made."""
    what = (
        f"Model `{options.shape}`, {options.workers} workers, {options.prompts} prompts with {options.samples} "
        f"responses of {options.tokens} tokens a step, a prefix every {options.stride} tokens."
    )
    return provenance("bench_shaping.py", argv, options.device) | {"what": what}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="path of OUT.jsonl and OUT.md without suffix")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--shape",
        choices=["embedded", *SHAPES],
        help="default: embedded on a CPU, 1.5b on a GPU; others have random weights",
    )
    parser.add_argument("--workers", type=int, help="default: 2 on a CPU, 1 on a GPU")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--tokens", type=int, help="length of a response; default: 160 on a CPU, 1024 on a GPU")
    parser.add_argument("--stride", type=int, default=40, help="tokens between two prefixes; default: the paper's 40")
    parser.add_argument("--micro-batch", type=int, help="responses; default: 32 on a CPU, 4 on a GPU")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
    parser.add_argument("--pairs", type=int, help="default: 40 on a CPU, 12 on a GPU")
    parser.add_argument("--warm-up", type=int, default=2, help="first pairs, which are not counted")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of both variants")
    options = parser.parse_args(argv)
    options.device = resolve_device(options.device)
    on_cpu = options.device == "cpu"
    defaults = {"shape": ("embedded", "1.5b"), "workers": (2, 1), "tokens": (160, 1024), "micro_batch": (32, 4)}
    for name, (cpu, gpu) in (defaults | {"pairs": (40, 12)}).items():
        if getattr(options, name) is None:
            setattr(options, name, cpu if on_cpu else gpu)
    if options.pairs < 2:
        parser.error(f"--pairs {options.pairs}: an interval needs at least 2")
    return options


def main(argv: list[str]) -> None:
    """The command line."""
    options = parse(argv)
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(options.shape, Path(folder, "model"))
        both = 2 * options.workers
        with ray_cluster(both, options.device):
            compare = side_by_side if options.device == "cpu" else one_after_another
            for pair in compare(options, Path(folder)):
                pairs.append(pair)
                times = ", ".join(f"{name} {pair[name]['seconds']:.2f} s" for name in VARIANTS)
                print(f"pair {len(pairs)} of {options.pairs}: {times}", file=sys.stderr, flush=True)
    facts, figures = describe(options, argv), summarise(pairs)
    if not figures["same_tokens"]:
        sys.exit("the two trainers sampled different numbers of tokens, so their times cannot be compared")
    write_report(options.out, facts, pairs, lambda facts, pairs: page(facts, summarise(pairs)))
    print(page(facts, figures))


if __name__ == "__main__":
    main(sys.argv[1:])
