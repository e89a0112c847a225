"""Frozen dataclasses that define the schema of VERL's configuration. Importing them is fast."""

from verl.config.common import OptimConfig
from verl.config.data import DataConfig
from verl.config.errors import ConfigError
from verl.config.load import CONFIG_DIR, load_config
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig, SFTDataConfig

__all__ = [
    "CONFIG_DIR",
    "ConfigError",
    "DataConfig",
    "OptimConfig",
    "PPOConfig",
    "SFTConfig",
    "SFTDataConfig",
    "load_config",
]
