"""The group ``rollout`` of the main job: the engine that samples responses, and how it samples."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from verl.config.checks import CountOrAll, Group, PositiveInt, Probability, Share, require, rule
from verl.config.common import EngineConfig, RepetitionPenalty, Temperature


@dataclass(frozen=True)
class SamplingConfig(Group):
    """How responses are sampled."""

    n: PositiveInt
    """Responses per prompt."""
    temperature: Temperature
    """Softmax temperature; 0 is greedy, at validation only."""
    top_p: Share
    """Nucleus mass in (0, 1]; 1 keeps the whole distribution."""
    top_k: CountOrAll
    """Number of most likely tokens kept; -1 keeps all."""
    min_p: Probability
    """Tokens are kept whose probability is at least this share of the most likely token's, in [0, 1]; 0 keeps all."""
    repetition_penalty: RepetitionPenalty
    """Divides positive logits of tokens that prompt or response hold already, and multiplies negative ones; above 0,
    1 is none."""

    def check(self) -> None:
        fix = "greedy decoding (temperature=0) gives one response; set n=1"
        self.require(self.temperature > 0 or self.n == 1, "n", fix)


@dataclass(frozen=True)
class RolloutConfig(SamplingConfig, EngineConfig):
    """The engine inside each worker, and how it samples responses in training. The trainer's log-probabilities are
    those at ``temperature``, and take nothing else into account: where ``top_p``, ``top_k``, ``min_p`` or
    ``repetition_penalty`` change the distribution, ``rollout/logprob_abs_diff`` shows by how much."""

    name: Literal["vllm", "hf"]
    """``vllm``; or ``hf``: the policy itself through ``transformers``, slower, for models that vLLM does not implement.
    ``hf`` computes in ``model.param_dtype``, holds the whole policy on every worker while it generates, and decodes
    batches of ``max_num_seqs`` responses, each until its last response ends."""
    free_cache_engine: bool
    """Free the engine's weights and KV cache while the models learn (vLLM's sleep mode, level 2); the next weight sync
    restores them. GPU only; no effect on a CPU."""
    update_weights_bucket_megabytes: PositiveInt
    """Weights that are gathered from the workers in one message for the engine, MiB, at least 1; a larger parameter has
    a message of its own. A sync needs up to twice as much memory. It changes speed, not results."""
    stop_token_ids: list[Annotated[int, rule(lambda token: token >= 0, "tokens are numbered from 0")]]
    """Tokens that end a response, besides those of the tokenizer and of the model's ``generation_config.json``."""
    stop: list[Annotated[str, rule(bool, "an empty string ends every response; leave it out")]]
    """Strings that end a response, in training and validation. The tokens up to the one that completes a string are
    learned from; the text that is scored ends before the string. Such a response is not truncated."""
    val_kwargs: SamplingConfig
    """Sampling at validation."""

    @property
    def train_kwargs(self) -> SamplingConfig:
        """Sampling of the training rollouts."""
        return SamplingConfig(**{field.name: getattr(self, field.name) for field in fields(SamplingConfig)})

    def check(self) -> None:
        for name, fix in {
            "hf_overrides": "set model.override_config, which the trained model obeys too",
            "speculative_config": "its log-probabilities are not those of the samples; leave it out",
        }.items():
            value = self.engine_kwargs.get(name)
            require(value is None, f"engine_kwargs.{name}", value, fix)
        hf = self.name == "hf"
        fix = "rollout.name=hf has no such arguments; leave it empty"
        self.require(not (hf and self.engine_kwargs), "engine_kwargs", fix)
        fix = "rollout.name=hf draws from streams alone; set it to true"
        self.require(self.seeded or not hf, "seeded", fix)
        self.require(self.temperature > 0, "temperature", "training needs sampling; set it above 0")
