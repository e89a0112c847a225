"""What veRL's options compose to here, for the tests of its options and of its published commands."""

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.cli.translate import translate
from verl.config import PPOConfig
from verl.config.load import compose_config

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{group}" for group in ("actor", "rollout", "ref"))
CORRECTION = "algorithm.rollout_correction"
EXAMPLES = {
    example["example"]: example["options"]
    for example in map(json.loads, Path(__file__).with_name("verl_examples.jsonl").read_text().splitlines())
}
"""Published commands by name, with their options."""


def composed(*arguments: str) -> DictConfig:
    return compose_config(PPOConfig, "ppo_trainer", translate(arguments))


def leaves(tree: Any) -> dict[str, Any]:
    """Every option with its value; interpolations resolved."""
    values = OmegaConf.to_container(tree, resolve=True)

    def walk(node: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(node, dict) or not node:
            return {prefix: node}
        return {name: leaf for key in node for name, leaf in walk(node[key], f"{prefix}.{key}".lstrip(".")).items()}

    return walk(values, "")
