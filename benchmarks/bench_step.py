"""Measure the time of a training step: GRPO, VERL-GRPO, and beside them TRL or another checkout of this project.

python benchmarks/bench_step.py --peer trl --out benchmarks/step_cpu                              # on a CPU
python benchmarks/bench_step.py --peer trl --out benchmarks/step_h100 --device cuda --shape 1.5b  # on a GPU
python benchmarks/bench_step.py --peer trl --out benchmarks/step_small --model data/models/smollm2-135m --workers 1 \\
    --train-file data/word_problems/train.parquet --prompts 8 --tokens 64 --trl-micro-batch 8 \\
    --temperature 0.6 --lr 2e-5                                                                   # a pretrained model
python benchmarks/bench_step.py --fixed-length --prompts 16 --rounds 240 --out benchmarks/shaping_cpu \\
    calculator.diff_stride=40                                                                     # what shaping costs
python benchmarks/bench_step.py --peer ../before --out /tmp/step                                  # against a checkout

The trainings take turns, step by step and in random order: GRPO and VERL-GRPO as `train.sh` runs them, and the peer.
All sample the same number of responses to the same prompts in the same order, learn from them in as many optimizer
steps, in the same precision, with the same KL term and learning rate, and have as many threads together. A step lasts
from its prompts to the next. With --fixed-length no token ends a response and no weight moves, so that all steps are
alike. A training that waits still keeps its connections alive, at some percent of a core; with --apart they follow each
other instead, and none waits, but no interval covers the machine's drift between them. So they do on a GPU, which holds
one engine at a time, with vLLM in all.

TRL is installed into an environment of its own (.bench/trl), which sees the packages of this one. It samples by
`transformers`, as it does without a GPU; --trl-micro-batch and --trl-processes say how it is run.

Writes OUT.jsonl (how it was made, then each round of steps) and OUT.md, on a CPU with each phase's time and its floor,
unless the peer is a checkout.
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench_report import ROOT, head, parser, provenance, read_lines, table, take_turns, write_report
from shapes import EMBEDDED, SHAPES, make_model
from step_floor import measured, section
from turns import Player

HERE = ROOT / "benchmarks"
OURS = {"GRPO": ["experiment=grpo", "calculator.enable=false"], "VERL-GRPO": ["experiment=verl_grpo"]}
TRL = "trl==1.16.*"
"""What pip installs."""

UPDATES = 2
"""Optimizer steps of a training step."""
KL_COEF = 0.001
STEP_TIMEOUT_S = 1800.0

Round = dict[str, dict[str, float]]
"""Training -> seconds of its step, CPU seconds of its processes, and mean reward of its responses."""


def trl_python() -> str:
    """The interpreter of an environment with TRL and all packages of this one."""
    folder = ROOT / ".bench" / "trl"
    python = folder / "bin/python"
    if not (folder / "complete").exists():
        print(f"installing {TRL} into {folder}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, TRL]
        subprocess.run(install, check=True)
        shared = sysconfig.get_path("purelib")
        Path(packages, "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
        (folder / "complete").touch()
    return str(python)


def ours(name: str, options: argparse.Namespace, model: Path, folder: Path, checkout: Path = ROOT) -> Player:
    """A training of this project, or of another ``checkout`` of it, by its command."""
    overrides = [
        *(
            f"preset={'embedded' if options.model is None else 'small'}",
            f"model.path={model}",
            f"model.param_dtype={'float32' if options.device == 'cpu' else 'bfloat16'}",
        ),
        *(f"data.train_files=[{options.train_file}]", "data.val_files=[]", f"data.train_batch_size={options.prompts}"),
        *(f"data.sampler.class_path={HERE}/turns.py", "data.sampler.class_name=TurnSampler"),
        f"data.max_response_length={options.tokens}",
        f"actor.ppo_mini_batch_size={options.prompts // UPDATES}",
        f"actor.micro_batch_size_per_gpu={options.micro_batch}",
        *(f"actor.optim.lr={options.lr}", "actor.optim.lr_scheduler_type=constant", "actor.optim.lr_warmup_steps=0"),
        *("actor.use_kl_loss=true", f"actor.kl_loss_coef={KL_COEF}", f"rollout.n={options.samples}"),
        f"rollout.temperature={options.temperature}",
        *(f"trainer.n_gpus_per_node={options.workers}", "trainer.total_training_steps=100000"),
        *("trainer.total_epochs=100000", "trainer.save_freq=0", "trainer.report_freq=-1", "trainer.test_freq=0"),
        *(f"trainer.default_local_dir={folder / 'run'}", f"device={options.device}"),
    ]
    python = sys.executable if checkout == ROOT else str(checkout / ".venv/bin/python")
    command = [python, "-m", "verl.trainer.main_ppo", *overrides, *OURS[name], *options.overrides]
    return Player(command, folder, {"PYTHONPATH": f"{checkout}:{HERE}"}, STEP_TIMEOUT_S)


def trl(options: argparse.Namespace, model: Path, folder: Path) -> Player:
    """TRL's training."""
    settings = {
        "model": str(model),
        "train_file": str(options.train_file),
        "folder": str(folder),
        "updates": UPDATES,
        "micro_batch": options.trl_micro_batch,
        "threads": options.threads // options.trl_processes,
        "processes": options.trl_processes,
        "kl_coef": KL_COEF,
        **{name: getattr(options, name) for name in ("prompts", "samples", "tokens", "temperature", "lr", "device")},
    }
    environment = {"OMP_NUM_THREADS": str(settings["threads"]), "PYTHONPATH": str(HERE)}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.trl_processes)]
    command = [trl_python(), *launcher, str(HERE / "bench_step_trl.py"), json.dumps(settings)]
    return Player(command, folder, environment, STEP_TIMEOUT_S)


def trainings(options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Callable[[], Player]]:
    """Name -> a function that starts the training."""
    starts: dict[str, Callable[[], Player]] = {
        name: partial(ours, name, options, model, folder / name) for name in OURS
    }
    if options.peer == "trl":
        starts["TRL"] = partial(trl, options, model, folder / "TRL")
    elif options.peer:
        checkout = Path(options.peer).resolve()
        for name in OURS:
            starts[f"{name}, peer"] = partial(ours, name, options, model, folder / f"{name}-peer", checkout)
    return starts


def model_of(options: argparse.Namespace, folder: Path) -> Path:
    """The folder of the model, which is made unless it is given."""
    if options.model is not None:
        return Path(options.model)
    model = folder / "model"
    if options.shape == "embedded" and not options.fixed_length:
        shutil.copytree(EMBEDDED, model)
    else:
        make_model(options.shape, model)
    return model


def rounds(options: argparse.Namespace, model: Path, folder: Path) -> Iterator[Round]:
    """Steps of all trainings, one each."""
    starts = trainings(options, model, folder)
    count = options.warm_up + options.rounds
    if options.apart:
        columns = {name: alone(start, count) for name, start in starts.items()}
        yield from ({name: column[i] for name, column in columns.items()} for i in range(count))
        return
    with ExitStack() as stack:
        players: dict[str, Player] = {}
        for name, start in starts.items():
            print(f"starting {name}", file=sys.stderr, flush=True)
            players[name] = start()
            stack.callback(players[name].end)
        yield from take_turns({name: partial(step, player) for name, player in players.items()}, count)


def alone(start: Callable[[], Player], count: int) -> list[dict[str, float]]:
    """Steps of a training that no other waits beside."""
    player = start()
    try:
        return [step(player) for _ in range(count)]
    finally:
        player.end()


def step(player: Player) -> dict[str, float]:
    """The figures of a player's next step; the reward is that of the last step that was logged."""
    before, seconds = player.cpu_seconds(), player.step()
    figures = {"seconds": seconds, "cpu_seconds": player.cpu_seconds() - before}
    run = player.folder / "run/metrics.jsonl"
    if run.exists():
        return figures | {"reward": float(read_lines(run)[-1]["critic/score_0/mean"])}
    logged = read_lines(player.folder / "log.jsonl")
    return figures | {"reward": float([entry["reward"] for entry in logged if "reward" in entry][-1])}


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


def summarise(steps: Sequence[Round], apart: bool) -> dict[str, Any]:
    """Medians, and each training's ratio to TRL or GRPO: of steps in turns with its interval, apart of the medians."""
    names = sorted(steps[0])
    base = "TRL" if "TRL" in names else "GRPO"
    figures: dict[str, Any] = {"base": base, "rounds": len(steps)}
    for name in names:
        late = [entry[name]["reward"] for entry in steps[len(steps) // 2 :] if "reward" in entry[name]]
        figures[name] = {"reward": statistics.mean(late) if late else math.nan}
        for key in ("seconds", "cpu_seconds") if "cpu_seconds" in steps[0][name] else ("seconds",):
            ratios = [entry[name][key] / entry[base][key] for entry in steps]
            median, of_base = (statistics.median(entry[one][key] for entry in steps) for one in (name, base))
            ratio = median / of_base if apart else statistics.median(ratios)
            interval = None if apart else median_interval(ratios)
            figures[name][key] = {"median": median, "ratio": ratio, "interval": interval}
    return figures


def page(facts: Mapping[str, Any], steps: Sequence[Round]) -> str:
    """The results as Markdown."""
    figures = summarise(steps, facts["apart"])
    base = figures["base"]
    order = "The trainings took turns, step by step.", "The ratio is the median of the rounds', with its 95% interval"
    if facts["apart"]:
        order = "One training ran after another.", "The ratio is that of the medians; drift allows it no interval"
    columns = ["training", "seconds:", f"of {base}'s:", "95% interval:"]
    cpu = "cpu_seconds" in figures[base]
    rows = []
    for name in sorted(name for name in figures if name not in ("base", "rounds")):
        row = [name, f"{figures[name]['seconds']['median']:.2f}"]
        for key in ("seconds", "cpu_seconds") if cpu else ("seconds",):
            ratios = figures[name][key]
            interval = ratios["interval"]
            row += [f"{ratios['ratio']:.3f}", "" if interval is None else "{:.3f} to {:.3f}".format(*interval)]
        reward = figures[name]["reward"]
        rows.append([*row, "" if math.isnan(reward) else f"{reward:.3f}"])
    columns += ["CPU time:", "95% interval:"] * cpu
    return f"""{head("The time of a training step", facts)}\
Medians of {figures["rounds"]} steps each. {order[0]}
{order[1]}; the reward is the mean over the second half of the steps.

{table([*columns, "mean reward:"], rows)}{section(facts) if "phases" in facts else ""}"""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    command = parser(__doc__)
    command.add_argument("--peer", help="trl, or the folder of another checkout with its .venv; none: ours alone")
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    command.add_argument("--shape", choices=["embedded", *SHAPES], default="embedded")
    command.add_argument("--model", type=Path, help="folder of a model, in place of --shape")
    command.add_argument("--train-file", type=Path, default=ROOT / "data/arithmetic/train.parquet")
    command.add_argument("--temperature", type=float, default=1.0)
    command.add_argument("--fixed-length", action="store_true", help="all responses have --tokens tokens; lr 1e-30")
    command.add_argument("--workers", type=int, help="default: 2 on a CPU, 1 on a GPU")
    command.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of TRL, in all processes")
    command.add_argument("--prompts", type=int, default=48)
    command.add_argument("--samples", type=int, default=8, help="responses to each prompt")
    command.add_argument("--tokens", type=int, default=160, help="most tokens of a response")
    command.add_argument(
        "--micro-batch", type=int, default=32, help="responses; with --model the preset's tokens count"
    )
    command.add_argument("--trl-micro-batch", type=int, default=32, help="TRL's per_device_train_batch_size")
    command.add_argument("--trl-processes", type=int, help="default: as many as --workers")
    command.add_argument("--apart", action="store_true", help="one training after another")
    command.add_argument("--lr", type=float, default=1e-4)
    command.add_argument("--rounds", type=int, default=20)
    command.add_argument("--warm-up", type=int, default=2, help="first rounds, which are not counted")
    command.add_argument("overrides", nargs="*", help="Hydra overrides of our trainings")
    options = command.parse_args(argv)
    if options.model is not None and options.fixed_length:
        command.error(
            "--fixed-length: its model is made with --shape, so that no token ends a response; leave out --model"
        )
    options.train_file = options.train_file.resolve()
    options.model = options.model and options.model.resolve()
    options.workers = options.workers or (2 if options.device == "cpu" else 1)
    options.trl_processes = options.trl_processes or options.workers
    options.apart = options.apart or options.device != "cpu"
    options.lr = 1e-30 if options.fixed_length else options.lr
    least = 1 if options.apart else 6
    if options.rounds < least:
        command.error(f"--rounds {options.rounds}: must be at least {least}; fewer give no 95% interval")
    return options


def counted(number: int, what: str) -> str:
    """As "1 worker", "2 processes"."""
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"


def describe(options: argparse.Namespace) -> str:
    """What was measured, in a sentence."""
    model = options.shape if options.model is None else options.model.name
    length = f"{'exactly' if options.fixed_length else 'at most'} {options.tokens} tokens"
    what = (
        f"Model `{model}`, {options.prompts} prompts with {options.samples} responses of {length}, "
        f"{UPDATES} optimizer steps, KL coefficient {KL_COEF}; {counted(options.workers, 'worker')} in ours"
    )
    if options.peer == "trl":
        samples = "transformers" if options.device == "cpu" else "vLLM"
        what += (
            f", {options.threads} threads in {counted(options.trl_processes, 'process')} and micro-batches of "
            f"{options.trl_micro_batch} in {TRL}. Ours sample by vLLM, TRL by {samples}"
        )
    return f"{what}."


def main(argv: list[str]) -> None:
    """Measure and write the report."""
    options = parse(argv)
    # So that the trainings end with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    steps: list[Round] = []
    phases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = model_of(options, folder)
        for number, entry in enumerate(rounds(options, model, folder), start=1 - options.warm_up):
            times = ", ".join(f"{name} {entry[name]['seconds']:.2f} s" for name in sorted(entry))
            print(f"round {number} of {options.rounds}: {times}", file=sys.stderr, flush=True)
            if number > 0:
                steps.append(entry)
        if options.device == "cpu" and options.peer in (None, "trl"):
            sizes = (options.rounds, options.prompts, options.samples, UPDATES, options.threads)
            phases = measured(model, {training: folder / training for training in sorted(steps[0])}, *sizes)
    facts = provenance("bench_step.py", argv, options.device)
    write_report(options.out, facts | {"what": describe(options), "apart": options.apart} | phases, steps, page)


if __name__ == "__main__":
    main(sys.argv[1:])
