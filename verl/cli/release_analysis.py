"""The release's motivation experiment: ``train.sh --motivation_mode allin --val_only True`` is an analysis."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from verl.cli.release_flags import NEEDS_VAL_ONLY, plain, sort_arguments, translate
from verl.cli.values import FlagError, literal, note
from verl.config.load import load_config
from verl.config.ppo import PPOConfig

MODES = ("exploit", "explore", "allin")

OWN_FLAGS = ("motivation_mode", "val_only", "plot_x_metrics", "plot_y_metrics", "plot_layer", "confidence_k")

NOT_IN_ANALYSIS = ("enable", "source", "metric_indices_add", "keep_prefixes")
"""Options of the calculator that an analysis sets itself."""


def analysis_arguments(arguments: Sequence[str]) -> list[str] | None:
    """The command line of ``verl.trainer.main_analysis`` for arguments of ``train.sh`` that ask for an analysis.

    The prompts are those of the validation files, the settings those of the rollout. ``exploit`` is greedy.

    Returns:
        None for arguments that ask for a training.

    Raises:
        FlagError: a flag is unknown or has an unsupported value; the mode comes without ``--val_only``.
        ConfigError: an override that does not fit.
    """
    if not any(argument.partition("=")[0] == "--motivation_mode" for argument in arguments):
        return None
    line = sort_arguments(arguments)
    mode = line.flags.get("motivation_mode", "").lower()
    if mode in ("", "disable"):
        return None
    if mode not in MODES:
        raise FlagError(f"--motivation_mode {mode}: must be one of disable, {', '.join(MODES)}")
    named = [*(o.partition("=")[2] for o in line.overrides if o.startswith("trainer.val_only=")), ""]
    if (line.flags.get("val_only") or named[0]).lower() != "true":
        raise FlagError(f"--motivation_mode {mode}: {plain(NEEDS_VAL_ONLY)}")
    flags = [f"--{name}={value}" for name, value in line.flags.items() if name not in OWN_FLAGS]
    overrides = [o for o in line.overrides if not o.startswith("trainer.val_only=")]
    config = load_config(PPOConfig, "ppo_trainer", translate([*flags, *overrides]))
    note("--motivation_mode: runs `python -m verl.trainer.main_analysis`; docs/analysis.md says what it measures")
    return [*(f"{key}={literal(value)}" for key, value in _options(config, mode, line.flags).items()), *line.hydra]


def _options(config: PPOConfig, mode: str, flags: dict[str, str]) -> dict[str, Any]:
    """Option of the analysis -> value."""
    rollout, data, trainer = config.rollout, config.data, config.trainer
    greedy = mode == "exploit"
    if not greedy and rollout.n < 2:
        raise FlagError(f"--motivation_mode {mode}: compares the responses to a prompt; set --rollout_n to at least 2")
    layer = _number(flags, "plot_layer", 1)
    layers = config.calculator.layers
    if not 1 <= layer <= len(layers):
        raise FlagError(f"--plot_layer {layer}: counts the entries of calculator.layers={layers} from 1")
    return {
        "model.path": config.model.path,
        "model.template": data.template,
        "model.max_response_length": data.max_response_length,
        "analysis.prompt_files": data.val_files,
        "analysis.mode": mode,
        "analysis.layer": layers[layer - 1],
        "analysis.confidence_k": _number(flags, "confidence_k", 5),
        "n_sampling": 1 if greedy else rollout.n,
        "temperatures": [0.0 if greedy else rollout.temperature],
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
        "seed": config.seed,
        "device": config.device,
        "reward_score.mode": config.reward_score.mode,
        "rollout.tensor_parallel_size": rollout.tensor_parallel_size,
        "rollout.gpu_memory_utilization": rollout.gpu_memory_utilization,
        "rollout.trust_remote_code": config.model.trust_remote_code,
        "trainer.experiment_name": trainer.experiment_name,
        "trainer.nnodes": trainer.nnodes,
        "trainer.n_gpus_per_node": trainer.n_gpus_per_node,
        **{f"calculator.{k}": v for k, v in asdict(config.calculator).items() if k not in NOT_IN_ANALYSIS},
        "calculator.compute_global_metrics": False,
        "calculator.compute_cumulative_global_metrics": False,
    }


def _number(flags: dict[str, str], name: str, default: int) -> int:
    value = flags.get(name) or str(default)
    if not value.isdecimal():
        raise FlagError(f"--{name} {value}: must be a whole number")
    return int(value)
