"""veRL's group ``actor_rollout_ref.rollout``: what each option becomes here."""

from verl.cli.values import FlagError
from verl.cli.verl_conversions import Line, Option, accepted, by, entries, is_null, only, refused, same, to, unquoted
from verl.cli.verl_models import CLASS, MEMORY, PROFILER, SPEED, ULYSSES, per_gpu, unless_null
from verl.config.overrides import NOT_SUPPORTED

ROLLOUT = "actor_rollout_ref.rollout"

_ONE_TURN = NOT_SUPPORTED["rollout.multi_turn"]
_AGENTS = NOT_SUPPORTED["rollout.agent"]
_UNUSED_TURNS = accepted("used by veRL with `multi_turn.enable` alone, which is refused")
_NO_EXPERTS = "an engine's workers share one model by tensor parallelism alone"


def _mode(value: str, line: Line) -> list[str]:
    if unquoted(value) not in ("sync", "async"):
        raise FlagError("must be sync or async")
    return []


def _length(option: str, default: int) -> Option:
    """A length that veRL reads from ``option``."""

    def translate(value: str, line: Line) -> list[str]:
        expected = line.text(option, str(default))
        if not is_null(value) and same(value) not in (expected, f"${{{option}}}"):
            raise FlagError(f"{option}={expected} sets it; leave it out")
        return []

    return Option("accepted", f"only the value of `{option}`, which sets it", translate)


def _longest(value: str, line: Line) -> list[str]:
    if is_null(value):
        return []
    parts = [line.number(f"data.max_{part}_length", 512) for part in ("prompt", "response")]
    if unquoted(value).isdigit() and int(unquoted(value)) < sum(parts):
        raise FlagError(f"the longest prompt and response have {sum(parts)} tokens; leave it out, or shorten those")
    return []


def top_k(value: str) -> str:
    """A number of tokens, whose 0 is no limit."""
    return "-1" if unquoted(value) == "0" else same(value)


def _quantization(value: str, line: Line) -> list[str]:
    return [] if is_null(value) else [f"++rollout.engine_kwargs.quantization={same(value)}"]


ROLLOUT_OPTIONS = {
    f"{ROLLOUT}.{name}": option
    for name, option in {
        "_target_": CLASS,
        "name": by(
            "`rollout.name`: `vllm`, or `hf`; other engines are refused by name",
            lambda value, _: _engine(value),
        ),
        "mode": Option(
            "accepted",
            "`sync` or `async`: all responses of a step are sampled with its weights before the update, in veRL with "
            "both",
            _mode,
            "all responses of a step are sampled with its weights before the update, as in veRL with either mode",
        ),
        "temperature": to("rollout.temperature"),
        "top_k": to("rollout.top_k", convert=top_k, note="0 is -1, all tokens"),
        "top_p": to("rollout.top_p"),
        "min_p": to("rollout.min_p"),
        "repetition_penalty": to("rollout.repetition_penalty"),
        "prompt_length": _length("data.max_prompt_length", 512),
        "response_length": _length("data.max_response_length", 512),
        "dtype": to("rollout.dtype"),
        "gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
        "ignore_eos": only(["false"], "a response ends at the end-of-sequence token"),
        "enforce_eager": to("rollout.enforce_eager"),
        "cudagraph_capture_sizes": SPEED,
        "free_cache_engine": to("rollout.free_cache_engine"),
        "tensor_model_parallel_size": to("rollout.tensor_parallel_size"),
        "data_parallel_size": only(
            ["1"], "there is an engine for every `rollout.tensor_parallel_size` workers", "leave it out"
        ),
        "expert_parallel_size": only(["1"], _NO_EXPERTS, "set tensor_model_parallel_size"),
        "pipeline_model_parallel_size": only(["1"], _NO_EXPERTS, "set tensor_model_parallel_size"),
        "max_num_batched_tokens": to(
            "rollout.max_num_batched_tokens", note="raised to the length of the longest prompt and response"
        ),
        "max_model_len": Option(
            "accepted",
            "only values of at least `data.max_prompt_length` + `data.max_response_length`, which set it",
            _longest,
        ),
        "max_num_seqs": to("rollout.max_num_seqs"),
        "enable_chunked_prefill": SPEED,
        "enable_prefix_caching": SPEED,
        "logprobs_mode": only(
            ["processed_logprobs"], "training needs the log-probabilities of the distribution that was sampled"
        ),
        "scheduling_policy": accepted("the order of requests; results are the same"),
        "load_format": accepted("the engine gets the policy's weights before its first response"),
        "swap_space": MEMORY,
        "engine_kwargs.swap_space": MEMORY,
        "engine_kwargs.vllm.swap_space": MEMORY,
        "update_weights_bucket_megabytes": MEMORY,
        "seed": accepted("`seed` fixes every random choice"),
        "use_fire_sampling": only(["false"], "every token is drawn at the same temperature"),
        "n_val": to("rollout.val_kwargs.n", note="an earlier name"),
        "val_temperature": to("rollout.val_kwargs.temperature", note="an earlier name"),
        "log_prob_micro_batch_size": per_gpu(
            "actor.log_prob_micro_batch_size_per_gpu", f"actor_rollout_ref.actor.{ULYSSES}"
        ),
        "log_prob_micro_batch_size_per_gpu": unless_null("actor.log_prob_micro_batch_size_per_gpu"),
        "log_prob_use_dynamic_bsz": accepted("`actor.use_dynamic_bsz` decides; memory and speed only"),
        "log_prob_max_token_len_per_gpu": to("actor.log_prob_max_token_len_per_gpu"),
        "micro_batch_size": accepted("the engine batches requests by itself, `rollout.max_num_seqs` (an earlier name)"),
        "disable_log_stats": accepted("the engine's own statistics; `timing_s/*` and `perf/*` are always logged"),
        "do_sample": only(["true"], "training needs sampling", "set rollout.temperature"),
        "n": to("rollout.n"),
        "over_sample_rate": only(["0", "0.0"], "every request is answered"),
        "multi_stage_wake_up": MEMORY,
        "engine_kwargs.vllm": entries("rollout.engine_kwargs"),
        "engine_kwargs.sglang": only(["{}"], "the engine is vLLM", "leave it out"),
        "engine_kwargs.trtllm": only(["{}"], "the engine is vLLM", "leave it out"),
        "engine_kwargs.sglang.*": refused("the engine is vLLM; leave it out"),
        "engine_kwargs.trtllm.*": refused("the engine is vLLM; leave it out"),
        "val_kwargs._target_": CLASS,
        "val_kwargs.top_k": to("rollout.val_kwargs.top_k", convert=top_k, note="0 is -1, all tokens"),
        "val_kwargs.top_p": to("rollout.val_kwargs.top_p"),
        "val_kwargs.temperature": to("rollout.val_kwargs.temperature"),
        "val_kwargs.n": to("rollout.val_kwargs.n"),
        "val_kwargs.do_sample": accepted("`val_kwargs.temperature` decides, in veRL's agent loop too: 0 is greedy"),
        "multi_turn._target_": CLASS,
        "multi_turn.enable": only(["false"], _ONE_TURN),
        "multi_turn.tool_config_path": only(["null"], NOT_SUPPORTED["data.tool_config_path"]),
        "multi_turn.interaction_config_path": only(["null"], _ONE_TURN),
        "multi_turn.*": _UNUSED_TURNS,
        "calculate_log_probs": accepted("the engine's log-probabilities are always recorded"),
        "agent._target_": CLASS,
        "agent.num_workers": accepted("there are no agents; the run's own workers sample"),
        "agent.default_agent_loop": only(["single_turn_agent"], _AGENTS),
        "agent.agent_loop_config_path": only(["null"], _AGENTS),
        "agent.custom_async_server._target_": CLASS,
        "agent.custom_async_server.path": only(["null"], _AGENTS),
        "agent.custom_async_server.name": only(["null"], _AGENTS),
        "checkpoint_engine.update_weights_bucket_megabytes": to("rollout.update_weights_bucket_megabytes"),
        "checkpoint_engine.*": accepted("weights stay in the workers that train; how they are moved changes no result"),
        "trace.*": accepted("traces of requests; results are the same"),
        "skip_rollout": only(["false"], "every step samples its own responses"),
        "skip_dump_dir": accepted("used by veRL with `skip_rollout` alone, which is refused"),
        "skip_tokenizer_init": accepted("the engine's tokenizer only finds stop strings"),
        "enable_rollout_routing_replay": only(["false"], "routes of experts are not replayed"),
        "profiler": PROFILER,
        "profiler.*": PROFILER,
        "prometheus.*": accepted("the engine's own statistics; metrics go to `trainer.logger`"),
        "quantization": by("`rollout.engine_kwargs.quantization`", _quantization),
        "quantization_config_file": only(["null"], "give the quantization's options in `rollout.engine_kwargs`"),
        "mtp": only(["null"], "the engine predicts one token at a time"),
        "mtp.*": accepted("used by veRL with `model.mtp.enable` alone, which is refused"),
        "layered_summon": accepted("weights are always gathered a few at a time"),
    }.items()
}


def _engine(value: str) -> list[str]:
    name = unquoted(value)
    if name not in ("vllm", "hf"):
        raise FlagError(f"the engine {name} is not supported; use vllm, or hf for models that vLLM does not implement")
    return [f"rollout.name={name}"]
