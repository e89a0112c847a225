"""Finds command-line options that have no effect, because the feature they belong to is disabled."""

from collections.abc import Iterable
from operator import attrgetter

from verl.config.ppo import PPOConfig

SWITCHES = {
    "rollout.multi_turn.": "rollout.multi_turn.enable=true",
    "actor.kl_loss_": "actor.use_kl_loss=true",
    "actor.use_unbiased_kl": "actor.use_kl_loss=true",
    "algorithm.kl_penalty": "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.": "algorithm.use_kl_in_reward=true",
    "algorithm.filter_groups.": "algorithm.filter_groups.enable=true",
    "algorithm.pf_ppo.": "algorithm.use_pf_ppo=true",
    "reward_score.overlong_buffer.": "reward_score.overlong_buffer.enable=true",
    "reward_score.judge.": "reward_score.judge.enable=true",
    "reward_model.": "reward_model.enable=true",
    "calculator.": "calculator.enable=true",
    "critic.": "algorithm.adv_estimator=gae",
    "teacher.": "teacher.model.path",
}
"""Maps prefixes of option names to the setting that these options require to have an effect."""


def unused_options(overrides: Iterable[str], config: PPOConfig) -> list[str]:
    """Return one line for each disabled feature whose options are set in ``overrides``."""
    names = [word.lstrip("+").partition("=")[0] for word in overrides if "=" in word and not word.startswith("~")]
    unused: dict[str, list[str]] = {}
    for start, switch in SWITCHES.items():
        option = switch.partition("=")[0]
        known = {"critic.": config.uses_critic, "teacher.": config.uses_teacher}
        is_on = known[start] if start in known else attrgetter(option)(config)
        found = [] if is_on else [name for name in names if name.startswith(start) and name != option]
        if found:
            unused.setdefault(switch, []).extend(found)
    return [f"{', '.join(names)}: no effect without {switch}" for switch, names in unused.items()]
