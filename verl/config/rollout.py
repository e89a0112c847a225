"""The group ``rollout`` of the main job: the engine that samples responses, and how it samples."""

from dataclasses import dataclass, fields
from typing import Literal

from verl.config.checks import require, require_positive
from verl.config.common import EngineConfig, check_temperature, check_truncation


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are sampled."""

    n: int
    """Responses per prompt."""
    temperature: float
    """Softmax temperature; 0 is greedy."""
    top_p: float
    """Nucleus mass in (0, 1]; 1 keeps the whole distribution."""
    top_k: int
    """Number of most likely tokens kept; -1 keeps all."""
    min_p: float
    """Tokens are kept whose probability is at least this share of the most likely token's, in [0, 1]; 0 keeps all."""
    repetition_penalty: float
    """Divides positive logits of tokens that prompt or response hold already, and multiplies negative ones; above 0,
    1 is none."""

    def __post_init__(self) -> None:
        check_sampling("rollout.val_kwargs", self)


def check_sampling(prefix: str, sampling: "SamplingConfig | RolloutConfig") -> None:
    """Raise ``ConfigError`` naming ``prefix.<field>`` for sampling options out of range."""
    n, greedy = sampling.n, sampling.temperature == 0
    require(n >= 1, f"{prefix}.n", n, "must be at least 1")
    check_temperature(f"{prefix}.temperature", sampling.temperature)
    check_truncation(f"{prefix}.", sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty)
    require(not greedy or n == 1, f"{prefix}.n", n, "greedy decoding (temperature=0) gives one response; set n=1")


@dataclass(frozen=True)
class RolloutConfig(EngineConfig):
    """The engine that samples responses inside each worker."""

    name: Literal["vllm", "hf"]
    """``vllm``; or ``hf``: the policy itself through ``transformers``, slower, for models that vLLM does not implement.
    ``hf`` computes in ``model.param_dtype``, holds the whole policy on every worker while it generates, and decodes
    batches of ``max_num_seqs`` responses, each until its last response ends."""
    free_cache_engine: bool
    """Free the engine's weights and KV cache while the models learn (vLLM's sleep mode, level 2); the next weight sync
    restores them. GPU only; no effect on a CPU."""
    update_weights_bucket_megabytes: int
    """Weights that are gathered from the workers in one message for the engine, MiB, at least 1; a larger parameter has
    a message of its own. A sync needs up to twice as much memory. It changes speed, not results."""
    stop_token_ids: list[int]
    """Tokens that end a response, besides those of the tokenizer and of the model's ``generation_config.json``."""
    stop: list[str]
    """Strings that end a response, in training and validation. The tokens up to the one that completes a string are
    learned from; the text that is scored ends before the string. Such a response is not truncated."""
    n: int
    """Responses per training prompt."""
    temperature: float
    """Softmax temperature of training rollouts, above 0. Log-probabilities are those at this temperature."""
    top_p: float
    """Nucleus mass of training rollouts in (0, 1]; 1 keeps the whole distribution. The trainer's log-probabilities take
    only the temperature into account: below 1, ``rollout/logprob_abs_diff`` shows the truncation."""
    top_k: int
    """Number of most likely tokens kept in training rollouts; -1 keeps all."""
    min_p: float
    """As in ``val_kwargs``, for training rollouts; what ``top_p`` says of log-probabilities holds here too."""
    repetition_penalty: float
    """As ``min_p``."""
    val_kwargs: SamplingConfig
    """Sampling at validation."""

    @property
    def train_kwargs(self) -> SamplingConfig:
        """Sampling of the training rollouts."""
        return SamplingConfig(**{field.name: getattr(self, field.name) for field in fields(SamplingConfig)})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sampling("rollout", self)
        require_positive("rollout.update_weights_bucket_megabytes", self.update_weights_bucket_megabytes)
        negative = any(token < 0 for token in self.stop_token_ids)
        require(not negative, "rollout.stop_token_ids", self.stop_token_ids, "tokens are numbered from 0")
        empty = "" in self.stop
        require(not empty, "rollout.stop", self.stop, "an empty string ends every response; leave it out")
        overrides = self.engine_kwargs.get("hf_overrides")
        field = "rollout.engine_kwargs.hf_overrides"
        require(overrides is None, field, overrides, "set model.override_config, which the trained model obeys too")
        drafts = self.engine_kwargs.get("speculative_config")
        field = "rollout.engine_kwargs.speculative_config"
        require(drafts is None, field, drafts, "its log-probabilities are not those of the samples; leave it out")
        given = self.engine_kwargs if self.name == "hf" else {}
        require(not given, "rollout.engine_kwargs", given, "rollout.name=hf has no such arguments; leave it empty")
        own = self.seeded or self.name == "vllm"
        require(own, "rollout.seeded", self.seeded, "rollout.name=hf draws from streams alone; set it to true")
        require(
            self.temperature > 0, "rollout.temperature", self.temperature, "training needs sampling; set it above 0"
        )
