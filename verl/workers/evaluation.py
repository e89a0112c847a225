"""The evaluation worker: a vLLM engine that takes requests and returns finished responses."""

import math
from typing import Any

from vllm import CompletionOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from verl.batch import RANK
from verl.config.calculator import CalculatorConfig
from verl.config.evaluation import EvaluationEngineConfig
from verl.data.responses import decode_responses, special_tags
from verl.models.hub import local_folder
from verl.models.tokenizer import load_tokenizer
from verl.rollout.queue import EngineRoom
from verl.rollout.requests import EngineModel, FinishedSample, FinishedSamples, SampleRequest
from verl.rollout.turns import Turns
from verl.rollout.vllm_engine import engine_room, from_stream, num_waiting, rank_columns, run_steps, start_engine
from verl.utils.distributed import WorkerPlace, join_world, seed_everything


class EvaluationWorker:
    """One of the processes that together hold ``world_size / tensor_parallel_size`` engines.

    The workers of one engine are neighbours in rank. Each has its own scheduler, and all must make the same decisions:
    they get the same requests, and work is measured in engine steps, never in seconds.
    """

    def __init__(
        self,
        config: EvaluationEngineConfig,
        place: WorkerPlace,
        model: EngineModel,
        calculator: CalculatorConfig | None,
    ) -> None:
        """``calculator``: how the engine measures the hidden states of responses; None: it captures none."""
        seed_everything(model.seed)
        join_world(place)
        self.model = model
        self.measures = calculator is not None
        self.is_first = place.rank % config.tensor_parallel_size == 0
        trust = config.trust_remote_code
        self.engine = start_engine(
            model.path, place, config, model.max_model_len, trust, model.seed, calculator
        ).llm_engine
        self.seeded = config.seeded
        self.tokenizer = load_tokenizer(local_folder(model.path), trust, needs_chat_template=False)
        self.turns = None
        if config.multi_turn.enable:
            ends = [self.tokenizer.eos_token_id, *model.stop_token_ids]
            self.turns = Turns(config.multi_turn, self.tokenizer, ends, None, place.device_type)
        self.loses_tags = bool(special_tags(self.tokenizer))
        """Whether the engine's text lacks the tags of thoughts."""

    def room(self) -> EngineRoom:
        """How much the engine can sample at once."""
        return engine_room(self.engine)

    def advance(self, requests: list[SampleRequest], max_steps: int) -> FinishedSamples:
        """Take further requests and run the engine.

        Args:
            requests: the same for all workers of the engine.
            max_steps: engine steps after which to return; earlier only if no request is left.
        """
        for request in requests:
            prompt: Any = {"prompt_token_ids": request.prompt_ids}
            self.engine.add_request(str(request.key), prompt, self._sampling_params(request))
        outputs, ended = run_steps(self.engine, max_steps)
        # The workers of an engine have sampled the same.
        samples = [self._finished(int(o.request_id), o.outputs[0]) for o in outputs if self.is_first]
        return FinishedSamples(samples, num_waiting(self.engine), len(ended))

    def _sampling_params(self, request: SampleRequest) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            top_p=self.model.top_p,
            top_k=self.model.top_k,
            min_p=self.model.min_p,
            repetition_penalty=self.model.repetition_penalty,
            max_tokens=self.model.max_response_length - request.num_begun,
            stop=self.model.stop,
            stop_token_ids=self.model.stop_token_ids,
            extra_args=from_stream(request.stream) if self.seeded else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _finished(self, key: int, completion: CompletionOutput) -> FinishedSample:
        text = completion.text
        if self.loses_tags:
            (text,) = decode_responses([list(completion.token_ids)], self.tokenizer, self.model.stop)
        return FinishedSample(
            key=key,
            response=text,
            num_tokens=len(completion.token_ids),
            truncated=completion.finish_reason == "length",
            metrics=_scalars(completion) if self.measures else {},
            token_ids=list(completion.token_ids) if self.model.keep_tokens or self.turns is not None else [],
            calls={} if self.turns is None else self.turns.calls(list(completion.token_ids)) | {"prefilled": 0},
        )


def _scalars(completion: CompletionOutput) -> dict[str, float]:
    """Rank metrics of one response; those that are not finite are left out."""
    metrics = {n.removeprefix(RANK): v for n, v in rank_columns([completion]).items() if n.startswith(RANK)}
    return {
        name if values.shape[1] == 1 else f"layer_{layer + 1}/{name}": value
        for name, values in metrics.items()
        for layer, value in enumerate(values[0].tolist())
        if math.isfinite(value)
    }
