"""Frozen dataclasses: the only schema of VERL's configuration. Imports nothing heavy."""

from verl.config.common import ModelConfig, OptimConfig
from verl.config.errors import ConfigError
from verl.config.load import CONFIG_DIR, load_config, parse_config
from verl.config.ppo import ActorConfig, DataConfig, PPOConfig, RolloutConfig, SamplingConfig, TrainerConfig
from verl.config.sft import SFTConfig, SFTDataConfig, SFTTrainerConfig
from verl.config.signal import (
    BASE_METRICS,
    AlgorithmConfig,
    CalculatorConfig,
    RewardManagerConfig,
    RewardScoreConfig,
)

__all__ = [
    "BASE_METRICS",
    "CONFIG_DIR",
    "ActorConfig",
    "AlgorithmConfig",
    "CalculatorConfig",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "PPOConfig",
    "RewardManagerConfig",
    "RewardScoreConfig",
    "RolloutConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTTrainerConfig",
    "SamplingConfig",
    "TrainerConfig",
    "load_config",
    "parse_config",
]
