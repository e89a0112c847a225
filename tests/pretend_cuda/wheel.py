"""What the plugin and the rollout need of a CUDA wheel of vLLM that is unpacked in a folder; prints what is missing.

python tests/pretend_cuda/wheel.py FOLDER

Nothing compiled is loaded and no engine starts: classes are imported, and what their instances hold is read in their
source.
"""

import ast
import importlib
import inspect
import json
import sys
import textwrap
import warnings
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

RELIED_ON: dict[str, str] = {
    # The first model runner, and what describes its steps.
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "execute_model execute_model_state profile_run input_batch "
    "requests query_start_loc discard_request_mask use_aux_hidden_state_outputs sampler _sample device get_model "
    "vllm_config",
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState": "scheduler_output hidden_states aux_hidden_states",
    "vllm.v1.worker.gpu_input_batch:InputBatch": "req_ids num_reqs num_computed_tokens_cpu",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": "sampling_params num_prompt_tokens",
    "vllm.v1.sample.sampler:Sampler": "topk_topp_sampler apply_temperature",
    "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler": "forward logprobs_mode",
    # The second one.
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "execute_model execute_model_state profile_run sampler device "
    "use_aux_hidden_state_outputs get_model vllm_config",
    "vllm.v1.worker.gpu.input_batch:InputBatch": "req_ids num_reqs num_computed_tokens_np num_scheduled_tokens "
    "prefill_len_np query_start_loc num_tokens",
    "vllm.v1.worker.gpu.sample.sampler:Sampler": "sampling_states",
    "vllm.v1.worker.gpu.sample.states:SamplingStates": "add_request seeds seeds_set",
    # The worker, the scheduler and the engine.
    "vllm.v1.worker.gpu_worker:Worker": "load_model compile_or_warm_up_model sleep wake_up reload_weights",
    "vllm.v1.core.sched.output:SchedulerOutput": "finished_req_ids scheduled_new_reqs total_num_scheduled_tokens",
    "vllm.v1.core.sched.output:NewRequestData": "req_id prompt_token_ids prompt_embeds sampling_params",
    "vllm.v1.core.sched.scheduler:Scheduler": "get_request_counts",
    "vllm.v1.engine.llm_engine:LLMEngine": "step add_request has_unfinished_requests engine_core vllm_config "
    "collective_rpc reset_prefix_cache",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": "driver_worker",
    "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts": "weight_loader quant_method moe_config",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod": "create_weights",
    "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig": "is_act_and_mul",
    "vllm.config.compilation:PassConfig": "fuse_allreduce_rms",
    "vllm.sampling_params:SamplingParams": "temperature top_p top_k min_p repetition_penalty max_tokens stop_token_ids "
    "stop logprobs extra_args output_kind detokenize n skip_reading_prefix_cache",
    "vllm.engine.arg_utils:EngineArgs": "dtype trust_remote_code distributed_executor_backend tensor_parallel_size "
    "generation_config enforce_eager gpu_memory_utilization max_num_seqs max_num_batched_tokens max_model_len seed "
    "kv_cache_memory_bytes disable_custom_all_reduce compilation_config additional_config load_format logprobs_mode "
    "enable_sleep_mode hf_overrides async_scheduling",
}
"""Class -> names of methods, fields and attributes of its instances."""


def names_of(kind: type) -> set[str]:
    """Methods, fields, annotations, and what the source of a class and its bases assigns to ``self``."""
    names = set(dir(kind))
    names |= {field.name for field in fields(kind)} if is_dataclass(kind) else set()
    names |= set(getattr(kind, "__struct_fields__", ()))
    for base in kind.__mro__:
        names |= set(vars(base).get("__annotations__", {}))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue  # written in C
        for node in ast.walk(tree):
            held = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if held and isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
    return names


def missing() -> list[str]:
    """What is relied on and not there."""
    lacking = []
    for place, wanted in RELIED_ON.items():
        module, _, name = place.partition(":")
        try:
            kind: Any = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            lacking.append(f"{place}: {error}")
            continue
        known = names_of(kind)
        lacking += [f"{place}.{item}" for item in wanted.split() if item not in known]
    return lacking


def main(folder: str) -> dict[str, Any]:
    """Version, whether it is supported, what is missing, and what the plugin's own checks and patches raise."""
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [folder, str(root)]
    warnings.simplefilter("ignore")
    vllm = importlib.import_module("vllm")
    assert Path(str(vllm.__file__)).is_relative_to(Path(folder)), vllm.__file__
    from vllm_patches import compat, frontend, worker

    raised = ""
    try:
        frontend.check()
        frontend.install()
        worker.install()
    except Exception as error:  # whatever it is, it is the result
        raised = f"{type(error).__name__}: {error}"
    found = {"version": vllm.__version__, "supported": compat.is_supported(vllm.__version__)}
    return found | {"missing": missing(), "raised": raised}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
