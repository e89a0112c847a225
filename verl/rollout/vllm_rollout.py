"""The vLLM engine in a worker's own process: samples responses and measures their hidden states on the spot."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
import vllm
from torch import Tensor
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from verl.batch import POLICY, Batch
from verl.config.errors import ConfigError
from verl.config.rollout import SamplingConfig
from verl.models.fsdp import WeightDtype
from verl.models.info import override_engine_config
from verl.models.policy import Policy
from verl.rollout.base import EngineReply, RolloutSetup
from verl.rollout.queue import EngineRoom
from verl.rollout.requests import ResponseRequests
from verl.rollout.sleep import EngineSleep
from verl.rollout.turns import Beginning, Turns, trailing_policy_tokens
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
            # Turns are measured when their conversation is over.
            reduces=not config.multi_turn.enable,
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
        self._begun: dict[str, Beginning] = {}
        self._version = -1
        """Of the weights; negative where no response is cut."""
        self.turns: Turns | None = None
        if config.multi_turn.enable:
            ends = setup.end_tokens
            self.turns = Turns(config.multi_turn, setup.tokenizer, ends, setup.calculator, place.device_type)

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
            beginning = self._begin(str(row), None if requests.begun is None else requests.begun[[i]])
            prompt: Any = {"prompt_token_ids": prompt_ids + beginning.tokens}
            params = self._sampling_params(requests.sampling_of(i), requests.streams[i], beginning)
            if requests.temperatures is not None:
                params.extra_args = {**(params.extra_args or {}), TEMPERATURES: requests.temperatures}
            engine.add_request(str(row), prompt, params)
        outputs, ended = run_steps(engine, max_steps, all_measured=self.turns is not None)
        return EngineReply(self._finished(outputs), num_waiting(engine), [int(name) for name in ended])

    def cut(self) -> EngineReply:
        """Give back every response that has not ended, and all that have."""
        engine = self.engine.llm_engine
        left = [(r.request_id, r.prompt_ids, r.token_ids, r.logprobs) for r in begun.cut(engine)]
        outputs, _ = run_steps(engine, 0)
        unfinished = self._episodes(left) if left and self.is_first else None
        if self.turns is not None:
            self.turns.forget([request_id for request_id, *_ in left])
        return EngineReply(self._finished(outputs), 0, open=unfinished)

    def measured(self) -> Batch | None:
        """Rank metrics of the conversations of which there are states, which are then forgotten."""
        return None if self.turns is None else self.turns.measured()

    def _begin(self, request_id: str, response: Batch | None) -> "Beginning":
        """What there is of a response, None of one that is new and will not be cut; it is noted."""
        if response is None:
            return Beginning([], 0, 0)
        tokens: list[int] = response.response_tokens.tolist()
        of_turn = read = len(tokens) if "source" not in response else trailing_policy_tokens(response.source)
        if self.setup.calculator is not None and self.turns is not None and not self.turns.holds(request_id):
            read = len(tokens)
        beginning = Beginning(tokens, of_turn, read, response)
        self._begun[request_id] = beginning
        return beginning

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

    def _sampling_params(self, sampling: SamplingConfig, stream: int, beginning: "Beginning") -> SamplingParams:
        extra = from_stream(stream) if self.seeded else {}
        if beginning.read:
            extra |= begun.going_on(beginning.of_turn, beginning.read)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=self.max_response_length - len(beginning.tokens),
            stop_token_ids=self.setup.end_tokens,
            stop=self.setup.stop_strings,
            logprobs=0,
            extra_args=extra or None,
            # States of tokens that a sibling left in the cache would not be computed.
            skip_reading_prefix_cache=True if beginning.read and self.setup.calculator is not None else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # Text is needed only to find stop strings in.
            detokenize=bool(self.setup.stop_strings),
        )

    def _finished(self, outputs: list[RequestOutput]) -> Batch | None:
        """The responses that have ended; the workers of an engine have sampled the same."""
        if self.turns is not None:
            for output in outputs:
                states = getattr(output.outputs[0], "hidden_states", None)
                self.turns.keep(output.request_id, self._begun[output.request_id], states)
        if not (outputs and self.is_first):
            return None
        completions = [output.outputs[0] for output in outputs]
        pairs = zip(outputs, completions, strict=True)
        batch = self._episodes(
            [(o.request_id, o.prompt_token_ids or [], c.token_ids, cast(Any, c.logprobs)) for o, c in pairs]
        )
        batch.fill(truncated=torch.tensor([completion.finish_reason == "length" for completion in completions]))
        if self.turns is not None:
            calls = [self.turns.calls(list(completion.token_ids)) for completion in completions]
            read = [len(o.prompt_token_ids or []) - (o.num_cached_tokens or 0) for o in outputs]
            return batch.fill(calls=[c | {"prefilled": num} for c, num in zip(calls, read, strict=True)])
        return batch if self.setup.calculator is None else batch.fill(**rank_columns(completions))

    def _episodes(self, responses: Sequence[tuple[str, Sequence[int], Sequence[int], Sequence[Any]]]) -> Batch:
        """Responses by request, prompt, tokens of the last turn, and vLLM's log-probabilities of those tokens that are
        not begun."""
        rows = []
        for request_id, prompt, tokens, sampled in responses:
            beginning = self._begun.pop(request_id, Beginning([], 0, 0))
            new, response = tokens[beginning.of_turn :], beginning.response
            logprobs = torch.tensor([place[token].logprob for token, place in zip(new, sampled, strict=True)])
            prompt = prompt if response is None else response.tokens[: int(response.prompt_lengths)].tolist()
            columns = {"rollout_logprobs": logprobs.float()}
            if self._version >= 0:
                columns["version"] = torch.full((len(new),), self._version, dtype=torch.int32)
            if self.turns is not None:
                columns["source"] = torch.full((len(new),), POLICY, dtype=torch.uint8)
            if response is not None:
                columns = {name: torch.cat([getattr(response, name), values]) for name, values in columns.items()}
            row = Batch.of([list(prompt)], [[*beginning.tokens, *new]], **columns)
            rows.append(row.fill(request=torch.tensor([int(request_id)])))
        return Batch.join(rows)


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
