"""vLLM engine for training, which samples with the policy's weights and measures hidden states during sampling."""

from collections.abc import Iterable
from functools import partial

import vllm
from torch import Tensor
from vllm import LLM

from verl.config.errors import ConfigError
from verl.models.fsdp import WeightDtype
from verl.models.info import override_engine_config
from verl.models.policy import Policy
from verl.rollout.base import RolloutSetup
from verl.rollout.environments.turns import Turns
from verl.rollout.sleep import EngineSleep
from verl.rollout.vllm_engine import start_engine
from verl.rollout.vllm_sampler import VLLMSampler
from verl.rollout.weight_sync import engine_dtype, reload_weights


class VLLMRollout(VLLMSampler):
    """Rollout engine for training, which returns responses and their log-probabilities under the policy's weights."""

    def __init__(self, setup: RolloutSetup, policy: Policy | None = None) -> None:
        """Start the engine with random weights, which are replaced later. ``policy`` is ignored.

        Raises ``ConfigError`` if vLLM has no native class for this architecture or cannot return the requested states.
        """
        config, model, place = setup.config.rollout, setup.config.model, setup.place
        sleeps = config.free_cache_engine and not config.has_pool and place.device_type == "cuda"
        engine = start_engine(
            model.path,
            place,
            config,
            setup.config.max_engine_length,
            model.trust_remote_code,
            setup.config.seed,
            setup.calculator,
            # In multi-turn conversations, states are measured when the conversation ends.
            reduces=not config.multi_turn.enable,
            # The weight files are read only once, for the policy.
            load_format="dummy",
            # Return log-probabilities after penalties, temperature, top-p, top-k and min-p.
            logprobs_mode="processed_logprobs",
            enable_sleep_mode=sleeps,
            hf_overrides=partial(override_engine_config, model) if model.override_config else {},
        )
        check_native_class(engine, model.path)
        longest, ends = setup.config.data.max_response_length, (setup.end_tokens, setup.stop_strings)
        turns = None
        if config.multi_turn.enable:
            turns = Turns(config.multi_turn, setup.tokenizer, setup.end_tokens, setup.calculator, place.device_type)
        measures = setup.calculator is not None
        super().__init__(engine, config, place, longest, *ends, measures, turns, trains=True)
        self.memory = EngineSleep(engine, sleeps)
        self.weight_dtype: WeightDtype = engine_dtype(engine)
        self._has_weights = False

    def load_weights(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the engine's weights and discard everything cached with the old weights."""
        with self.memory.new_weights():
            reload_weights(self.engine, parameters)
        self._has_weights = True

    def sleep(self) -> None:
        """Free weights and KV cache if ``rollout.free_cache_engine`` is set on a GPU."""
        self.memory.sleep()

    @property
    def needs_weights(self) -> bool:
        """Whether the engine is asleep or has not received weights yet."""
        return self.memory.asleep or not self._has_weights


def check_native_class(engine: LLM, path: str) -> None:
    """Check that vLLM has a native class for the model at ``path``.

    Otherwise, vLLM would use the ``transformers`` class and patch it for compilation, which breaks existing instances
    such as the policy in this process. Raises ``ConfigError`` if vLLM has no native class for the model.
    """
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    if type(model).__name__.startswith("Transformers"):
        raise ConfigError(
            f"model.path={path!r}: vLLM {vllm.__version__} has no native class for {model.config.model_type} and would "
            "change the one of transformers, which trains in the same process; set rollout.name=hf"
        )
