"""Estimate the memory of a training run on each GPU, phase by phase; docs/memory.md derives the terms.

python scripts/estimate_memory.py --gpu-gb 80 preset=paper experiment=verl_grpo model=qwen2.5_7b trainer=gpus8

Arguments are those of train.sh. Only the model's config.json is read; nothing runs. The terms hold for decoder-only
models with gated MLPs (Qwen, Llama, Mistral). A run on GPUs makes the same estimate at its start, and warns.
"""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from verl.config import PPOConfig, load_config
from verl.config.errors import ConfigError
from verl.config.teacher import path_option
from verl.run.memory import GB, estimate, parameters_of, peak_of, shape_of


def main(argv: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu-gb", type=float, default=80.0, help="memory of one GPU, 10^9 bytes")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of the main job")
    options = parser.parse_args(argv)
    try:
        config = load_config(PPOConfig, "ppo_trainer", options.overrides)
        shapes = {name: shape for name, model in config.models.items() if (shape := shape_of(model))}
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if unknown := [
        f"{path_option(name)}={model.path!r}" for name, model in config.models.items() if name not in shapes
    ]:
        sys.exit(f"error: {', '.join(unknown)}: only decoder-only models with gated MLPs are estimated")
    phases = estimate(config, options.gpu_gb, shapes)
    names = list(dict.fromkeys(name for parts in phases.values() for name in parts))
    size = f"{parameters_of(shapes['model'])[0] / GB:.2f} billion parameters"
    title = f"GB on each of {config.trainer.world_size} GPUs of {options.gpu_gb:g}: {config.model.path}, {size}"
    table = Table("", *phases, title=title, title_justify="left")
    for name in names:
        table.add_row(name, *(f"{parts[name]:.1f}" if name in parts else "" for parts in phases.values()))
    table.add_row("total", *(f"{sum(parts.values()):.1f}" for parts in phases.values()))
    console = Console()
    console.print(table)
    if phases["generate"]["KV cache"] <= 0:
        sys.exit("error: no room for the KV cache; set rollout.gpu_memory_utilization higher")
    worst, total, fix = peak_of(phases)
    verdict = "fits" if total <= options.gpu_gb else f"does not fit; {fix}"
    console.print(f"{worst}: {total:.1f} GB; {verdict}", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
