"""The vLLM engine in a worker's own process: samples responses and measures their hidden states on the spot."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
import vllm
from torch import Tensor
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.config.rollout import SamplingConfig
from verl.models.fsdp import WeightDtype
from verl.models.info import override_engine_config
from verl.models.policy import Policy
from verl.rollout.base import EngineReply, RolloutSetup
from verl.rollout.queue import EngineRoom
from verl.rollout.requests import ResponseRequests
from verl.rollout.sleep import EngineSleep
from verl.rollout.vllm_engine import engine_room, from_stream, num_waiting, rank_columns, run_steps, start_engine
from verl.rollout.weight_sync import engine_dtype, reload_weights
from vllm_patches import begun
from vllm_patches.temperatures import KEY as TEMPERATURES


class VLLMRollout:
    """Samples responses with log-probabilities, and measures their hidden states if the setup says so.

    The ``rollout.tensor_parallel_size`` workers of one engine are neighbours in rank. Each has its own scheduler; given
    the same prompts, all make the same decisions and sample the same responses.
    """

    def __init__(self, setup: RolloutSetup, policy: Policy | None = None) -> None:
        """``policy``: not used; the engine starts with weights of no meaning, and gets the policy's later.

        Raises:
            ConfigError: vLLM has no native model class for this architecture, or does not return the states asked for.
        """
        config, model, place = setup.config.rollout, setup.config.model, setup.place
        self.setup = setup
        self.max_response_length = setup.config.data.max_response_length
        self.is_first = place.rank % config.tensor_parallel_size == 0
        sleeps = config.free_cache_engine and not config.has_pool and place.device_type == "cuda"
        self.engine = start_engine(
            model.path,
            place,
            config,
            setup.config.max_sequence_length,
            model.trust_remote_code,
            setup.config.seed,
            setup.calculator,
            # The files are read once, for the policy.
            load_format="dummy",
            # Log-probabilities of the sampled distribution: after penalties, temperature, top-p, top-k and min-p.
            logprobs_mode="processed_logprobs",
            enable_sleep_mode=sleeps,
            hf_overrides=partial(override_engine_config, model) if model.override_config else {},
        )
        check_native_class(self.engine, model.path)
        self.seeded = config.seeded
        self.memory = EngineSleep(self.engine, sleeps)
        self.weight_dtype: WeightDtype = engine_dtype(self.engine)
        self._has_weights = False
        self._begun: dict[str, tuple[list[float], list[int]]] = {}
        """Log-probabilities and versions of the tokens with which a request began."""
        self._version = -1
        """Of the weights; negative where no response is cut."""

    @property
    def room(self) -> EngineRoom:
        """As many responses as ``rollout.max_num_seqs``, and as the KV cache has tokens for."""
        return engine_room(self.engine.llm_engine)

    def advance(self, requests: ResponseRequests, max_steps: int) -> EngineReply:
        """Take further requests, decode at most ``max_steps`` tokens of each, and return what has ended."""
        engine = self.engine.llm_engine
        if requests.begun is not None:
            self._version = requests.version
        for i, (row, prompt_ids) in enumerate(zip(requests.rows, requests.prompt_ids, strict=True)):
            so_far = self._begin(str(row), None if requests.begun is None else requests.begun[[i]])
            prompt: Any = {"prompt_token_ids": prompt_ids + so_far}
            params = self._sampling_params(requests.sampling_of(i), requests.streams[i], len(so_far))
            if requests.temperatures is not None:
                params.extra_args = {**(params.extra_args or {}), TEMPERATURES: requests.temperatures}
            engine.add_request(str(row), prompt, params)
        outputs, ended = run_steps(engine, max_steps)
        return EngineReply(self._finished(outputs), num_waiting(engine), [int(name) for name in ended])

    def cut(self) -> EngineReply:
        """Give back every response that has not ended, and all that have."""
        engine = self.engine.llm_engine
        left = [(r.request_id, r.prompt_ids, r.token_ids, r.logprobs) for r in begun.cut(engine)]
        outputs, _ = run_steps(engine, 0)
        unfinished = self._episodes(left) if left and self.is_first else None
        return EngineReply(self._finished(outputs), 0, open=unfinished)

    def _begin(self, request_id: str, response: Batch | None) -> list[int]:
        """The tokens that there are of a response, None of one that will not be cut; the rest is noted."""
        if response is None:
            return []
        if self.is_first:
            self._begun[request_id] = response.rollout_logprobs.tolist(), response.version.tolist()
        tokens: list[int] = response.response_tokens.tolist()
        return tokens

    def load_weights(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the engine's weights and drop what was cached under the old ones."""
        with self.memory.new_weights():
            reload_weights(self.engine, parameters)
        self._has_weights = True

    def sleep(self) -> None:
        """Free weights and KV cache, with ``rollout.free_cache_engine`` on a GPU."""
        self.memory.sleep()

    @property
    def needs_weights(self) -> bool:
        """Whether the engine sleeps, or has not been given weights yet."""
        return self.memory.asleep or not self._has_weights

    def _sampling_params(self, sampling: SamplingConfig, stream: int, num_begun: int) -> SamplingParams:
        """``num_begun``: tokens that there are of the response."""
        extra = (from_stream(stream) if self.seeded else {}) | (begun.going_on(num_begun) if num_begun else {})
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=self.max_response_length - num_begun,
            stop_token_ids=self.setup.end_tokens,
            stop=self.setup.stop_strings,
            logprobs=0,
            extra_args=extra or None,
            # States of tokens that a sibling left in the cache would not be computed.
            skip_reading_prefix_cache=True if num_begun and self.setup.calculator is not None else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # Text is needed only to find stop strings in.
            detokenize=bool(self.setup.stop_strings),
        )

    def _finished(self, outputs: list[RequestOutput]) -> Batch | None:
        """The responses that have ended; the workers of an engine have sampled the same."""
        if not (outputs and self.is_first):
            return None
        completions = [output.outputs[0] for output in outputs]
        pairs = zip(outputs, completions, strict=True)
        batch = self._episodes(
            [(o.request_id, o.prompt_token_ids or [], c.token_ids, cast(Any, c.logprobs)) for o, c in pairs]
        )
        batch.fill(truncated=torch.tensor([completion.finish_reason == "length" for completion in completions]))
        return batch if self.setup.calculator is None else batch.fill(**rank_columns(completions))

    def _episodes(self, responses: Sequence[tuple[str, Sequence[int], Sequence[int], Sequence[Any]]]) -> Batch:
        """Responses by request, prompt, tokens, and vLLM's log-probabilities of those tokens that are not begun."""
        logprobs: list[float] = []
        versions: list[int] = []
        for request_id, _, tokens, sampled in responses:
            earlier, of_earlier = self._begun.pop(request_id, ([], []))
            new = tokens[len(earlier) :]
            logprobs += earlier + [place[token].logprob for token, place in zip(new, sampled, strict=True)]
            versions += of_earlier + [self._version] * len(new)
        ids, prompts, tokens_of, _ = zip(*responses, strict=True)
        batch = Batch.of(
            prompts,
            tokens_of,
            request=torch.tensor([int(request_id) for request_id in ids]),
            rollout_logprobs=torch.tensor(logprobs),
        )
        return batch if self._version < 0 else batch.fill(version=torch.tensor(versions, dtype=torch.int32))


def check_native_class(engine: LLM, path: str) -> None:
    """Check that vLLM runs the model at ``path`` with a native class.

    Without one it uses the class of ``transformers`` and prepares it for compilation. Instances created earlier, such
    as the policy in this process, can then no longer be called.

    Raises:
        ConfigError: it does not.
    """
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    if type(model).__name__.startswith("Transformers"):
        raise ConfigError(
            f"model.path={path!r}: vLLM {vllm.__version__} has no native class for {model.config.model_type} and would "
            "change the one of transformers, which trains in the same process; set rollout.name=hf"
        )
