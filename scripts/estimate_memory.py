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
from verl.models.info import ModelInfo
from verl.run.memory import GB, Shape, estimate, fix_of, peak_of


def main(argv: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu-gb", type=float, default=80.0, help="memory of one GPU, 10^9 bytes")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of the main job")
    options = parser.parse_args(argv)
    try:
        config = load_config(PPOConfig, "ppo_trainer", options.overrides)
        model = config.model
        policy, critic, reward_model, teacher = (
            Shape.of(ModelInfo.of(held).text_config) if used else None
            for held, used in (
                (model, True),
                (config.critic.model, config.uses_critic),
                (config.reward_model.model, config.uses_reward_model),
                (config.teacher.model, config.teacher.loads_model),
            )
        )
        assert policy is not None
    except ConfigError as error:
        sys.exit(f"error: {error}")
    phases = estimate(config, options.gpu_gb, policy, critic, reward_model, teacher)
    names = list(dict.fromkeys(name for parts in phases.values() for name in parts))
    title = f"GB on each of {config.trainer.world_size} GPUs of {options.gpu_gb:g}: {model.path}, "
    table = Table("", *phases, title=title + f"{policy.parameters / GB:.2f} billion parameters", title_justify="left")
    for name in names:
        table.add_row(name, *(f"{parts[name]:.1f}" if name in parts else "" for parts in phases.values()))
    table.add_row("total", *(f"{sum(parts.values()):.1f}" for parts in phases.values()))
    console = Console()
    console.print(table)
    if phases["generate"]["KV cache"] <= 0:
        sys.exit("error: no room for the KV cache; set rollout.gpu_memory_utilization higher")
    worst, total = peak_of(phases)
    verdict = "fits" if total <= options.gpu_gb else f"does not fit; {fix_of(worst)}"
    console.print(f"{worst}: {total:.1f} GB; {verdict}", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
