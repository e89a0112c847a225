"""The group ``rollout`` of the main job: the engine that samples responses, and how it samples."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from verl.config.checks import (
    CountOrAll,
    Group,
    NotNegativeInt,
    PositiveInt,
    Probability,
    Seconds,
    Share,
    require,
    require_import_path,
    rule,
    within,
)
from verl.config.common import RepetitionPenalty, Temperature

_INSIDE_WORKERS = "the engine runs inside the run's own workers"
_SAMPLING = "the run's own options decide how responses are sampled and where they end"
RESERVED_ENGINE_KWARGS = {
    "model": "set model.path",
    "tokenizer": "responses are read with the tokenizer of model.path",
    "skip_tokenizer_init": "stop strings are found by the engine's tokenizer",
    "trust_remote_code": "set trust_remote_code of the model or, in an evaluation, of rollout",
    "dtype": "set rollout.dtype",
    "tensor_parallel_size": "set rollout.tensor_parallel_size, which the workers are arranged by",
    "pipeline_parallel_size": _INSIDE_WORKERS,
    "data_parallel_size": _INSIDE_WORKERS,
    "distributed_executor_backend": _INSIDE_WORKERS,
    "worker_cls": _INSIDE_WORKERS,
    "enable_sleep_mode": "set rollout.free_cache_engine",
    "max_model_len": "the longest prompt and response set it",
    "seed": "set seed; the workers of one engine must draw alike",
    "logprobs_mode": "training needs the log-probabilities of the sampled distribution",
    "generation_config": _SAMPLING,
    "override_generation_config": _SAMPLING,
}
"""Arguments of ``vllm.LLM`` that ``rollout.engine_kwargs`` may not set -> why, or what to set instead."""


@dataclass(frozen=True)
class EngineConfig(Group):
    """The vLLM engine inside each worker; the group ``rollout`` of a job."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    """vLLM's weight precision: ``auto`` (float32 on CPU, bfloat16 on GPU), ``float32``, ``bfloat16`` or ``float16``."""
    enforce_eager: bool
    """Run without CUDA graphs and compilation. CPU engines always do, because compilation would need a C++ compiler."""
    gpu_memory_utilization: Annotated[float, within("(0, 1)")]
    """Share of the GPU's memory that vLLM takes, weights included. Not used on a CPU."""
    kv_cache_memory_mb: NotNegativeInt
    """Size of the KV cache in MiB per worker. 0: what ``gpu_memory_utilization`` leaves on a GPU, 512 MiB on a CPU."""
    max_num_seqs: PositiveInt
    """Most sequences that one engine decodes at the same time."""
    max_num_batched_tokens: int
    """Most tokens that one engine step computes; at least one whole sequence."""
    seeded: bool
    """Draw every response from its own stream of random numbers, fixed by the seed and its place among the prompts and
    their samples, whatever else is sampled. ``false`` leaves sampling to vLLM; then nothing can be sampled again."""
    tensor_parallel_size: PositiveInt
    """Workers, consecutive in rank, that form one engine. Must divide the workers of a machine."""
    engine_kwargs: dict[str, Any]
    """Further arguments of ``vllm.LLM``, such as ``block_size`` or ``enable_prefix_caching``; they override the
    options above. Arguments that the trainer sets are refused by name."""

    def check(self) -> None:
        least = f"must be at least rollout.max_num_seqs={self.max_num_seqs}"
        self.require(self.max_num_batched_tokens >= self.max_num_seqs, "max_num_batched_tokens", least)
        kwargs = self.engine_kwargs
        for name, value in kwargs.items():
            reason = RESERVED_ENGINE_KWARGS.get(name, "")
            require(not reason, f"engine_kwargs.{name}", value, reason)
        fix = "engines get the policy's weights in training, and read the model's files in evaluation; leave it out"
        require(kwargs.get("load_format") != "dummy", "engine_kwargs.load_format", "dummy", fix)
        field, further = "engine_kwargs.additional_config", kwargs.get("additional_config", {})
        require(isinstance(further, dict), field, further, "must be a mapping, name: value")
        for name, option in {"hidden_states": "calculator.*", "sampling_streams": "rollout.seeded"}.items():
            require(name not in further, field, further, f"set {option} instead of {name}")


@dataclass(frozen=True)
class SamplingFilters(Group):
    """Options of sampling, except its temperature, that change the model's distribution."""

    top_p: Share
    """Probability mass of nucleus sampling, in (0, 1]; 1 keeps the whole distribution."""
    top_k: CountOrAll
    """Number of most likely tokens kept; -1 keeps all."""
    min_p: Probability
    """Tokens are kept whose probability is at least this share of the most likely token's, in [0, 1]; 0 keeps all."""
    repetition_penalty: RepetitionPenalty
    """Divides positive logits of tokens that prompt or response hold already, and multiplies negative ones; above 0,
    1 is none."""


@dataclass(frozen=True)
class SamplingConfig(SamplingFilters):
    """Sampling of responses."""

    n: PositiveInt
    """Responses per prompt."""
    temperature: Temperature
    """Softmax temperature; 0 is greedy, at validation only."""

    def check(self) -> None:
        fix = "greedy decoding (temperature=0) gives one response; set n=1"
        self.require(self.temperature > 0 or self.n == 1, "n", fix)


@dataclass(frozen=True)
class MultiTurnConfig(Group):
    """Conversations: the policy and an environment take turns until one of them ends it (docs/conversations.md)."""

    enable: bool
    """Let responses have several turns, with ``tools``, ``tool_config_path`` or ``environment``.
    ``data.max_response_length`` is then the budget of a whole conversation, the environment's messages included."""
    environment: str | None
    """A class of your own, ``my.py:Env``, with ``start(record) -> state`` and ``step(state, turn) -> (state, messages,
    done, reward)``. Null: the environment is that of ``tools``."""
    tools: list[str]
    """Python functions, ``[my.py:calculator]``, with annotated arguments and a docstring in Google's style, which
    describe them to the model; ``async`` ones run together. What they return is shown to the model as text."""
    tool_config_path: str | None
    """A YAML file in veRL's form that names classes derived from its ``BaseTool``; used together with ``tools``."""
    format: str
    """How the model writes a call: one of vLLM's tool parsers, such as ``hermes`` (Qwen) or ``llama3_json``."""
    max_assistant_turns: PositiveInt | None
    """Most turns of the policy; null: until the environment or the budget ends it."""
    max_user_turns: PositiveInt | None
    """Most turns of the environment; null: no limit."""
    max_parallel_calls: PositiveInt
    """Calls in one turn that are answered, at least 1; further ones are left out."""
    max_tool_response_length: PositiveInt
    """Characters of one message of a tool, at least 1; of a longer one a part is left out."""
    tool_response_truncate_side: Literal["left", "middle", "right"]
    """Part of it that is kept, as in veRL: ``left`` the beginning, ``right`` the end, ``middle`` half of each."""
    reward: Literal["add", "only"]
    """The environment's rewards, summed over the turns: ``add`` them to the verifier's score, or let them be the
    ``only`` score; then a conversation is correct if the sum is above 0, and no verifier is asked."""
    num_workers: NotNegativeInt
    """Processes that run environments and tools; 0: one for each core that is left, at most 32. ``async`` ones share
    one."""
    timeout_s: Seconds
    """Longest step of an environment, in seconds. A longer one is ended, and its reply is a message."""
    memory_limit_mb: PositiveInt
    """Most memory of such a process beyond its size after imports, MiB; the reply to a larger step is a message."""

    @property
    def has_tools(self) -> bool:
        """Whether the environment is that of tools."""
        return self.environment is None

    @property
    def calls_tools(self) -> bool:
        """Whether there are conversations, with tools."""
        return self.enable and self.has_tools

    def check(self) -> None:
        if not self.enable:
            return
        tools = bool(self.tools) or self.tool_config_path is not None
        self.require(tools or self.environment is not None, "enable", "name tools, tool_config_path or environment")
        fix = "an environment of your own calls tools itself; leave out tools and tool_config_path"
        self.require(not (tools and self.environment is not None), "environment", fix)
        fix = "tools give no rewards; set it to add"
        self.require(not tools or self.reward == "add", "reward", fix)
        paths = {f"tools[{i}]": path for i, path in enumerate(self.tools)} | {"environment": self.environment}
        for field, path in paths.items():
            if path is not None:
                require_import_path(field, path)


@dataclass(frozen=True)
class RolloutConfig(SamplingConfig, EngineConfig):
    """The engine inside each worker, and how it samples responses in training.

    The trainer's log-probabilities are those at ``temperature``. ``rollout/logprob_abs_diff`` shows the effect of
    ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty``, which they leave out."""

    name: Literal["vllm", "hf"]
    """``vllm``; or ``hf``: the policy itself through ``transformers``, slower, for models that vLLM does not implement.
    ``hf`` computes in ``model.param_dtype``, holds the whole policy on every worker while it generates, and decodes
    batches of ``max_num_seqs`` responses, each until its last response ends."""
    free_cache_engine: bool
    """Free the engine's weights and KV cache while the models learn (vLLM's sleep mode, level 2); the next weight sync
    restores them. GPU only; no effect on a CPU."""
    update_weights_bucket_megabytes: PositiveInt
    """Weights in one message to the engine, MiB, at least 1; a larger parameter has a message of its own. A sync needs
    up to twice as much memory. It changes speed, not results."""
    stop_token_ids: list[Annotated[int, rule(lambda token: token >= 0, "tokens are numbered from 0")]]
    """Further tokens that end a response, next to the tokenizer's and those in ``generation_config.json``."""
    stop: list[Annotated[str, rule(bool, "an empty string ends every response; leave it out")]]
    """Strings that end a response, in training and validation. The tokens up to the one that completes a string are
    learned from; the text that is scored ends before the string. Such a response is not truncated."""
    val_kwargs: SamplingConfig
    """Sampling at validation."""
    multi_turn: MultiTurnConfig
    nnodes: NotNegativeInt
    """Machines whose engines have devices of their own, apart from the trainer's (docs/async.md); 0: the engines are
    inside the trainer's workers. A machine with enough GPUs may hold both."""
    n_gpus_per_node: NotNegativeInt
    """Workers of those engines on each machine: one per GPU, or this many CPU processes; 0 without ``nnodes``."""

    @property
    def has_pool(self) -> bool:
        """Whether the engines have workers of their own."""
        return self.nnodes > 0

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
        fix = "engines of their own need machines and workers on each; set it and rollout.{} above 0, or both to 0"
        self.require(self.nnodes > 0 or not self.n_gpus_per_node, "nnodes", fix.format("n_gpus_per_node"))
        self.require(self.n_gpus_per_node > 0 or not self.nnodes, "n_gpus_per_node", fix.format("nnodes"))
        fix = "rollout.name=hf samples with the trainer's policy itself; set it to 0"
        self.require(not (hf and self.nnodes), "nnodes", fix)
        fix = "rollout.name=hf samples one turn; set rollout.name=vllm, or this to false"
        self.require(not (hf and self.multi_turn.enable), "multi_turn.enable", fix)


@dataclass(frozen=True)
class AsyncTrainingConfig(Group):
    """Responses that outlive a step (docs/async.md)."""

    max_staleness: Annotated[int, rule(lambda steps: steps >= 0, "must be 0 or more")]
    """How many versions of the weights a response may be behind when it is learned from; 0: every response is sampled
    in its own step. Above 0 it needs ``partial_rollout``, or engines of their own (``rollout.nnodes``)."""
    partial_rollout: bool
    """End a step as soon as enough groups are complete; open responses continue under newer weights. Needs a
    ``max_staleness`` of at least 1, and with engines of their own of at least 2."""

    def check(self) -> None:
        fix = "responses that are carried over are behind; set async_training.max_staleness=1 or more"
        self.require(not self.partial_rollout or self.max_staleness > 0, "partial_rollout", fix)
