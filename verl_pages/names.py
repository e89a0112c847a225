"""Display names of metrics on pages and in figures."""

import re

RANK_NAMES = {
    "Effective Rank": ("ER", "effective rank"),
    "Effective Rank diff": ("ERV", "its velocity"),
    "Effective Rank diff 2": ("ERA", "its acceleration"),
}
"""Maps the paper's metrics, which are shown first, to their short and long display names."""

OTHERS = {
    "num_tokens": "tokens",
    "response_length": "tokens of a response",
    "logprob": "log-probability, mean",
    "entropy": "entropy, mean",
    "state_speed": "speed of states",
    "state_dispersion": "dispersion of states",
    "advantage_0": "advantage before shaping",
    "phi": "Phi",
    "avg_log_probs": "log-probability, mean",
    "avg_logits_entropy": "entropy, mean",
    "response_entropy": "entropy of frequencies",
    "response_confidence": "confidence",
    "n_gram_repetition_rate": "repetition of n-grams",
    "reflection_words": "reflection words",
    "exploration_token_jsd": "divergence of tokens",
    "correctness": "share correct",
    "correctness_avg": "share correct",
}


def metric_name(name: str) -> str:
    """Return the display name of a metric, such as ``ERA`` for ``Effective Rank diff 2``."""
    layer, _, metric = name.rpartition("/")
    if match := re.fullmatch(r"layer_(\d+)", layer):
        return f"{metric_name(metric)}, layer {match[1]}"
    if name in RANK_NAMES:
        return RANK_NAMES[name][0]
    if match := re.fullmatch(r"(.+) diff( 2)?", name, re.DOTALL):
        return f"{'acceleration' if match[2] else 'velocity'} of {match[1]}"
    of_prompts = OTHERS.get(name.removesuffix("_avg"))
    return OTHERS.get(name) or (f"{of_prompts}, of prompts" if of_prompts else name)
