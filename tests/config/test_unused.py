"""Options on the command line without an effect."""

from operator import attrgetter

from tests.kit import ppo_config
from verl.config.load import option_names
from verl.config.ppo import PPOConfig
from verl.config.unused import SWITCHES, unused_options


def unused(*overrides: str) -> list[str]:
    return unused_options(overrides, ppo_config(*overrides))


def test_options_of_what_is_off_are_named():
    environment = "rollout.multi_turn.environment=verl.rollout.programs:Programs"
    assert unused(
        environment,
        "actor.use_kl_loss=false",
        "actor.kl_loss_coef=0.1",
        "++actor.kl_loss_type=k3",
        "actor.clip_ratio_low=0.1",
    ) == [
        "rollout.multi_turn.environment: no effect without rollout.multi_turn.enable=true",
        "actor.kl_loss_coef, actor.kl_loss_type: no effect without actor.use_kl_loss=true",
    ]
    assert unused("critic.optim.lr=1e-5") == ["critic.optim.lr: no effect without algorithm.adv_estimator=gae"]
    assert unused("reward_score.judge.weight=2") == [
        "reward_score.judge.weight: no effect without reward_score.judge.enable=true"
    ]
    assert unused("actor.kl_loss_coef=0.1", "actor.use_kl_loss=true", "calculator.enable=true") == []


def test_switches_name_options():
    names = [*option_names(PPOConfig, "")]
    config = ppo_config()
    for start, switch in SWITCHES.items():
        assert sum(name.startswith(start) for name in names) > 0, start
        attrgetter(switch.partition("=")[0])(config)
