"""Translates the release's motivation experiment, ``train.sh --motivation_mode allin``, to an analysis."""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from operator import attrgetter
from typing import Any

from verl.cli.tables import CommandLine
from verl.cli.translate import overrides_of
from verl.cli.values import FlagError, literal, note, override_key
from verl.config.common import MachineOptions
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.rollout import EngineConfig

MODES = ("exploit", "explore", "allin")

OWN_FLAGS = ("motivation_mode", "val_only", "plot_x_metrics", "plot_y_metrics", "plot_layer", "confidence_k")

SET_BY_ANALYSIS = ("enable", "source", "metric_indices_add", "keep_prefixes")
"""Calculator options that every analysis sets itself."""

NAMES = {
    "model.path": "model.path",
    "model.template": "data.template",
    "model.apply_chat_template_kwargs": "data.apply_chat_template_kwargs",
    "model.max_response_length": "data.max_response_length",
    "analysis.prompt_files": "data.val_files",
    "data.max_problems": "data.val_sample_size",
    "policy.attn_implementation": "model.attn_implementation",
    "policy.fsdp": "model.fsdp",
    # This option belongs to ``model`` in training and to ``rollout`` in an evaluation.
    "rollout.trust_remote_code": "model.trust_remote_code",
    **{name: f"rollout.{name}" for name in ("top_p", "top_k", "min_p", "repetition_penalty")},
    **{f"rollout.{field.name}": f"rollout.{field.name}" for field in fields(EngineConfig)},
    **{name: name for name in ("seed", "device", "reward_score", "trainer.experiment_name", "trainer.n_gpus_per_node")},
    **{f"trainer.{field.name}": f"trainer.{field.name}" for field in fields(MachineOptions)},
}
"""Maps each option or group of an analysis to its counterpart in training."""

NO_COUNTERPART: dict[str, Any] = {
    "rollout.name": "vllm",
    "rollout.stop": [],
    "rollout.stop_token_ids": [],
    "data.prompt_key": "prompt",
    "data.reward_fn_key": "data_source",
    "data.answer_key": None,
    "data.data_source": None,
    "model.override_config": {},
    "model.lora_adapter_path": None,
}
"""Options that affect responses but do not exist in an analysis, each with its only allowed value."""


def analysis_arguments(line: CommandLine) -> list[str] | None:
    """Return the command line of ``verl.trainer.main_analysis`` if ``train.sh``'s arguments request an analysis.

    The analysis uses the validation prompts and the rollout's sampling options. ``exploit`` decodes greedily.

    Returns:
        None if the arguments request training, as they do without ``--val_only``.

    Raises ``FlagError`` if a flag is unknown or has an unsupported value, or an option has no counterpart in an
    analysis. Raises ``ConfigError`` if an override is invalid.
    """
    mode = line.flags.get("motivation_mode", "").lower()
    if mode in ("", "disable"):
        return None
    if mode not in MODES:
        raise FlagError(f"--motivation_mode {mode}: must be one of disable, {', '.join(MODES)}")
    # As in other commands, an override takes precedence over the flag.
    named = [o.partition("=")[2] for o in line.overrides if override_key(o) == "trainer.val_only"]
    if [line.flags.get("val_only", ""), *named][-1].lower() != "true":
        return None
    flags = {name: value for name, value in line.flags.items() if name not in OWN_FLAGS}
    overrides = [o for o in line.overrides if override_key(o) != "trainer.val_only"]
    config = load_config(PPOConfig, "ppo_trainer", overrides_of(CommandLine(flags, overrides, [])))
    note("--motivation_mode: runs `python -m verl.trainer.main_analysis`; docs/analysis.md says what it measures")
    options = _options(config, mode, line.flags)
    if "trainer.default_local_dir" in line.options:
        options["trainer.default_local_dir"] = config.trainer.default_local_dir
    return [*(override for option, value in options.items() for override in _overrides(option, value)), *line.hydra]


def _options(config: PPOConfig, mode: str, flags: dict[str, str]) -> dict[str, Any]:
    """Return the analysis options and their values."""
    greedy = mode == "exploit"
    if not greedy and config.rollout.n < 2:
        raise FlagError(f"--motivation_mode {mode}: compares the responses to a prompt; set --rollout_n to at least 2")
    for option, usual in NO_COUNTERPART.items():
        if (value := attrgetter(option)(config)) != usual:
            raise FlagError(f"{option}={value}: an analysis has no such option; leave it out with --motivation_mode")
    if config.data.val_sample_size != -1:
        note("--val_sample_size: an analysis takes the first prompts of each file")
    layer, layers = _number(flags, "plot_layer", 1), config.calculator.layers
    if not 1 <= layer <= len(layers):
        raise FlagError(f"--plot_layer {layer}: counts the entries of calculator.layers={layers} from 1")
    calculator = {name: value for name, value in asdict(config.calculator).items() if name not in SET_BY_ANALYSIS}
    return {
        **{option: attrgetter(source)(config) for option, source in NAMES.items()},
        "analysis.mode": mode,
        "analysis.layer": layers[layer - 1],
        "analysis.confidence_k": _number(flags, "confidence_k", 5),
        "n_sampling": 1 if greedy else config.rollout.n,
        "temperatures": [0.0 if greedy else config.rollout.temperature],
        "calculator": calculator | {"compute_global_metrics": False, "compute_cumulative_global_metrics": False},
    }


def _overrides(option: str, value: object) -> list[str]:
    """Return overrides that set ``option``, with one override per mapping entry so that new entries can be added."""
    value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if isinstance(value, Mapping):
        return [override for name, of in value.items() for override in _overrides(f"{option}.{name}", of)]
    return [f"++{option}={literal(value)}"]


def _number(flags: dict[str, str], name: str, default: int) -> int:
    value = flags.get(name) or str(default)
    if not value.isdecimal():
        raise FlagError(f"--{name} {value}: must be a whole number")
    return int(value)
