"""Measure how waiting threads of a worker affect an update and decoding, on a quiet and on a busy machine.

python benchmarks/bench_threads.py [--model data/tiny_model] [--responses 64] [--rounds 10] [--busy 0 2 6]

One process for each setting of OpenMP, all alive at once; they take turns, one update and one decoding each, so that
ratios are of one run. With --busy N, N processes that never wait run beside them. Prints medians in seconds as a table.
The settings are of GNU's OpenMP, which torch's builds for CPUs bring.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "20,000": {"GOMP_SPINCOUNT": "20000"},
}
WORK = ("update", "decode")


def play(model: str, responses: int) -> None:
    """Do what each line of stdin names, and print its seconds."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM

    from verl.algorithms.losses import StepSize
    from verl.batch import Batch
    from verl.config import PPOConfig, load_config
    from verl.workers.actor import Actor

    torch.set_num_threads(2)
    overrides = [f"model.path={model}", "actor.use_kl_loss=false", "model.fsdp.fsdp_size=-1", "device=cpu"]
    config = load_config(PPOConfig, "ppo_trainer", [*overrides, "actor.micro_batch_size_per_gpu=16"])
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    actor = Actor(config.actor, config.algorithm.rollout_correction, config.model, mesh, 1.0, 10, 24)
    engine = AutoModelForCausalLM.from_pretrained(model).eval()
    generator = torch.Generator().manual_seed(0)
    prompts, tokens = (torch.randint(7, 100, (responses, size), generator=generator).tolist() for size in (16, 24))
    batch = Batch.of([prompts[i // 8] for i in range(responses)], tokens)
    num = len(batch.response_tokens)
    size = StepSize(num, responses, 24)
    batch.fill(learn_mask=torch.ones(num, dtype=torch.bool), old_logprobs=torch.full((num,), -4.0))
    batch.fill(advantages=torch.randn(num, generator=generator))

    @torch.no_grad()
    def decode() -> None:
        cache, ids = None, torch.tensor(tokens[:8])
        for _ in range(16):
            output = engine(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)

    print("ready", flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        decode() if line.strip() == "decode" else actor.update(batch, size.num_tokens, size.num_sequences)
        print(time.perf_counter() - started, flush=True)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--model", default=str(ROOT / "data/tiny_model"))
    command.add_argument("--responses", type=int, default=64)
    command.add_argument("--rounds", type=int, default=10)
    command.add_argument("--busy", type=int, nargs="+", default=[0, 2, 6], help="processes that never wait")
    command.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    options = command.parse_args()
    if options.play:
        return play(options.model, options.responses)
    again = [sys.executable, __file__, "--play", "--model", options.model, "--responses", str(options.responses)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    players = {name: subprocess.Popen(again, env=environment | env, **pipes) for name, env in SETTINGS.items()}

    def turn(name: str, work: str) -> float:
        player = players[name]
        print(work, file=player.stdin, flush=True)
        return float(player.stdout.readline())

    assert all(player.stdout.readline() == "ready\n" for player in players.values())
    print("| busy processes | work | " + " | ".join(SETTINGS) + " |\n|---|---|" + "---|" * len(SETTINGS))
    for number in options.busy:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
        rounds = [{(name, work): turn(name, work) for work in WORK for name in SETTINGS} for _ in range(options.rounds)]
        for process in busy:
            process.kill()
        for work in WORK:
            medians = [statistics.median(each[name, work] for each in rounds[1:]) for name in SETTINGS]
            print(f"| {number} | {work} | " + " | ".join(f"{value:.2f}" for value in medians) + " |", flush=True)
    for player in players.values():
        player.kill()


if __name__ == "__main__":
    main()
