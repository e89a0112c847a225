"""Measure the time of a training step, ours and TRL's, on the same model, prompts, sizes and cores.

python benchmarks/bench_step.py --peer trl --out benchmarks/step_cpu                              # on a CPU
python benchmarks/bench_step.py --peer trl --out benchmarks/step_h100 --device cuda --shape 1.5b  # on a GPU

Three trainings take turns, step by step and in random order, so a drift of the machine's speed affects all alike:
GRPO and VERL-GRPO as `train.sh` runs them, and TRL's GRPOTrainer. All sample the same number of responses to the same
prompts in the same order, learn from them in as many optimizer steps, in the same precision, with the same KL term and
learning rate, and have as many threads together. A step lasts from its prompts to the next. A training that waits still
keeps its connections alive, at some percent of a core; with --apart they follow each other instead, and none waits, but
no interval covers the machine's drift between them. So they do on a GPU, which holds one engine at a time, with vLLM in
all.

TRL is installed into an environment of its own (.bench/trl), which sees the packages of this one. It samples by
`transformers`, as it does without a GPU; --trl-micro-batch and --trl-processes say how it is run.

Writes OUT.jsonl (how it was made, then each round of steps) and OUT.md.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_report import provenance, write_report
from bench_shaping import make_model, median_interval
from turns import Player

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "benchmarks"
TRAIN_FILE = ROOT / "data/arithmetic/train.parquet"

OURS = {"GRPO": ["experiment=grpo", "calculator.enable=false"], "VERL-GRPO": ["experiment=verl_grpo"]}
PEERS = {"trl": "trl==1.16.*"}
"""Name -> what pip installs."""

UPDATES = 2
"""Optimizer steps of a training step."""
KL_COEF = 0.001
STEP_TIMEOUT_S = 1800.0

Round = dict[str, dict[str, float]]
"""Training -> seconds of its step and mean reward of its responses."""


def peer_python(peer: str) -> str:
    """The interpreter of an environment with the peer and all packages of this one."""
    folder = ROOT / ".bench" / peer
    python = folder / "bin/python"
    if not (folder / "complete").exists():
        print(f"installing {PEERS[peer]} into {folder}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, PEERS[peer]]
        subprocess.run(install, check=True)
        shared = sysconfig.get_path("purelib")
        Path(packages, "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
        (folder / "complete").touch()
    return str(python)


def ours(name: str, options: argparse.Namespace, model: Path, folder: Path) -> Player:
    """A training of this project, by its command."""
    overrides = [
        *(f"model.path={model}", f"model.param_dtype={'float32' if options.device == 'cpu' else 'bfloat16'}"),
        *(f"data.train_files=[{TRAIN_FILE}]", "data.val_files=[]", f"data.train_batch_size={options.prompts}"),
        *(f"data.sampler.class_path={SCRIPTS}/turn_sampler.py", "data.sampler.class_name=TurnSampler"),
        f"data.max_response_length={options.tokens}",
        f"actor.ppo_mini_batch_size={options.prompts // UPDATES}",
        f"actor.micro_batch_size_per_gpu={options.micro_batch}",
        *(f"actor.optim.lr={options.lr}", "actor.optim.lr_scheduler_type=constant", "actor.optim.lr_warmup_steps=0"),
        *("actor.use_kl_loss=true", f"actor.kl_loss_coef={KL_COEF}", f"rollout.n={options.samples}"),
        *(f"trainer.n_gpus_per_node={options.workers}", "trainer.total_training_steps=100000"),
        *("trainer.total_epochs=100000", "trainer.save_freq=0", "trainer.report_freq=-1", "trainer.test_freq=0"),
        *(f"trainer.default_local_dir={folder / 'run'}", f"device={options.device}"),
    ]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, *OURS[name], *options.overrides]
    return Player(command, folder, {"PYTHONPATH": str(SCRIPTS)}, STEP_TIMEOUT_S)


def trl(options: argparse.Namespace, model: Path, folder: Path) -> Player:
    """TRL's training."""
    settings = {
        "model": str(model),
        "train_file": str(TRAIN_FILE),
        "folder": str(folder),
        "data_source": "arithmetic",
        "updates": UPDATES,
        "micro_batch": options.trl_micro_batch,
        "threads": options.threads // options.trl_processes,
        "processes": options.trl_processes,
        "kl_coef": KL_COEF,
        **{name: getattr(options, name) for name in ("prompts", "samples", "tokens", "lr", "device")},
    }
    environment = {"OMP_NUM_THREADS": str(settings["threads"]), "PYTHONPATH": str(SCRIPTS)}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.trl_processes)]
    command = [peer_python(options.peer), *launcher, str(SCRIPTS / "bench_step_trl.py"), json.dumps(settings)]
    return Player(command, folder, environment, STEP_TIMEOUT_S)


def trainings(options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    """Name -> a function that starts the training."""
    found: dict[str, Any] = {name: lambda name=name: ours(name, options, model, folder / name) for name in OURS}
    if options.peer:
        found["TRL"] = lambda: trl(options, model, folder / "TRL")
    return found


def rounds(options: argparse.Namespace, folder: Path) -> Iterator[Round]:
    """Steps of all trainings, one each."""
    model = folder / "model"
    if options.shape == "embedded":
        shutil.copytree(ROOT / "data/tiny_model", model)
    else:
        make_model(options.shape, model)
    starts = trainings(options, model, folder)
    count = options.warm_up + options.rounds
    if options.apart:
        columns = {name: _alone(start, count) for name, start in starts.items()}
        yield from ({name: column[i] for name, column in columns.items()} for i in range(count))
        return
    with ExitStack() as stack:
        players: dict[str, Player] = {}
        for name, start in starts.items():
            print(f"starting {name}", file=sys.stderr, flush=True)
            players[name] = start()
            stack.callback(players[name].end)
        for index in range(count):
            order = list(players)
            random.Random(index).shuffle(order)
            yield {name: _step(players[name]) for name in order}


def _alone(start: Any, count: int) -> list[dict[str, float]]:
    player = start()
    try:
        return [_step(player) for _ in range(count)]
    finally:
        player.end()


def _step(player: Player) -> dict[str, float]:
    return {"seconds": player.step(), "reward": _reward(player)}


def _reward(player: Player) -> float:
    """The mean reward of the last step that was logged."""
    run = player.folder / "run/metrics.jsonl"
    if run.exists():
        return float(json.loads(run.read_text().splitlines()[-1])["critic/score_0/mean"])
    logged = [json.loads(line) for line in (player.folder / "log.jsonl").read_text().splitlines()]
    return float([entry["reward"] for entry in logged if "reward" in entry][-1])


def summarise(found: Sequence[Round], apart: bool) -> dict[str, Any]:
    """Medians, and each training's ratio to TRL or GRPO: of steps in turns with its interval, apart of the medians."""
    names = sorted(found[0])
    base = "TRL" if "TRL" in names else "GRPO"
    figures: dict[str, Any] = {"base": base, "rounds": len(found)}
    medians = {name: statistics.median(entry[name]["seconds"] for entry in found) for name in names}
    for name in names:
        ratios = [entry[name]["seconds"] / entry[base]["seconds"] for entry in found]
        figures[name] = {
            "seconds": medians[name],
            "ratio": medians[name] / medians[base] if apart else statistics.median(ratios),
            "interval": None if apart else median_interval(ratios),
            "reward": statistics.mean(entry[name]["reward"] for entry in found[len(found) // 2 :]),
        }
    return figures


def page(facts: Mapping[str, Any], found: Sequence[Round]) -> str:
    """The results as Markdown."""
    figures = summarise(found, facts["apart"])
    base = figures["base"]
    peer = f"{facts['peer']}, " if "peer" in facts else ""
    order = "The trainings took turns, step by step.", "The ratio is the median of the rounds', with its 95% interval"
    if facts["apart"]:
        order = "One training ran after another.", "The ratio is that of the medians; drift allows it no interval"
    lines = [
        "# The time of a training step",
        "",
        f"{facts['hardware']}, torch {facts['torch']}, {peer}{facts['date']}. {facts['what']}",
        "",
        "Regenerate with",
        "",
        f"    {facts['command']}",
        "",
        f"Medians of {figures['rounds']} steps each. {order[0]}",
        f"{order[1]}; the reward is the mean over the second half of the steps.",
        "",
        f"| training | seconds | of {base}'s | 95% interval | mean reward |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in sorted(name for name in figures if name not in ("base", "rounds")):
        own = figures[name]
        interval = "" if own["interval"] is None else "{:.2f} to {:.2f}".format(*own["interval"])
        lines.append(f"| {name} | {own['seconds']:.2f} | {own['ratio']:.2f} | {interval} | {own['reward']:.3f} |")
    return "\n".join([*lines, ""])


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="path of OUT.jsonl and OUT.md without suffix")
    parser.add_argument("--peer", choices=list(PEERS), help="the other framework; none: GRPO and VERL-GRPO alone")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=["embedded", "1.5b"], default="embedded")
    parser.add_argument("--workers", type=int, help="default: 2 on a CPU, 1 on a GPU")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of TRL, in all processes")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--samples", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of a response")
    parser.add_argument("--micro-batch", type=int, default=32, help="responses")
    parser.add_argument("--trl-micro-batch", type=int, default=32, help="TRL's per_device_train_batch_size")
    parser.add_argument("--trl-processes", type=int, help="default: as many as --workers")
    parser.add_argument("--apart", action="store_true", help="one training after another")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=2, help="first rounds, which are not counted")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of our trainings")
    options = parser.parse_args(argv)
    options.workers = options.workers or (2 if options.device == "cpu" else 1)
    options.trl_processes = options.trl_processes or options.workers
    options.apart = options.apart or options.device != "cpu"
    least = 1 if options.apart else 6
    if options.rounds < least:
        parser.error(f"--rounds {options.rounds}: must be at least {least}; fewer give no 95% interval")
    return options


def main(argv: list[str]) -> None:
    """The command line."""
    options = parse(argv)
    # So that the trainings end with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    found: list[Round] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, entry in enumerate(rounds(options, Path(folder)), start=1 - options.warm_up):
            times = ", ".join(f"{name} {entry[name]['seconds']:.2f} s" for name in sorted(entry))
            print(f"round {number} of {options.rounds}: {times}", file=sys.stderr, flush=True)
            if number > 0:
                found.append(entry)
    what = (
        f"Model `{options.shape}`, {options.prompts} prompts with {options.samples} responses of at most "
        f"{options.tokens} tokens, {UPDATES} optimizer steps, KL coefficient {KL_COEF}; "
        f"{options.workers} workers in ours"
    )
    if options.peer:
        what += (
            f", {options.threads} threads in {options.trl_processes} processes and micro-batches of "
            f"{options.trl_micro_batch} in TRL. Ours sample by vLLM, TRL by "
            f"{'transformers' if options.device == 'cpu' else 'vLLM'}"
        )
    facts = provenance("bench_step.py", argv, options.device)
    facts |= {"what": f"{what}.", "apart": options.apart, "peer": PEERS.get(options.peer)}
    write_report(options.out, facts, found, page)
    print(page(facts, found))


if __name__ == "__main__":
    main(sys.argv[1:])
