"""Evaluation worker: a vLLM engine that loads its weights from a model folder."""

from verl.config.calculator import CalculatorConfig
from verl.config.evaluation import EvaluationEngineConfig
from verl.models.hub import local_folder
from verl.models.tokenizer import load_tokenizer
from verl.rollout.environments.turns import Turns
from verl.rollout.queue import EngineCapacity
from verl.rollout.requests import EngineModel
from verl.rollout.vllm_engine import start_engine
from verl.rollout.vllm_sampler import VLLMSampler
from verl.utils.distributed import WorkerPlace, join_world, seed_everything


class EvaluationWorker:
    """One of the processes that together run ``world_size / tensor_parallel_size`` engines."""

    def __init__(
        self,
        config: EvaluationEngineConfig,
        place: WorkerPlace,
        model: EngineModel,
        calculator: CalculatorConfig | None,
    ) -> None:
        """Load the engine. ``calculator`` contains the options for hidden states, or is None if none are captured."""
        seed_everything(model.seed)
        join_world(place)
        trust, turns = config.trust_remote_code, None
        engine = start_engine(model.path, place, config, model.max_model_len, trust, model.seed, calculator)
        if config.multi_turn.enable:
            tokenizer = load_tokenizer(local_folder(model.path), trust, needs_chat_template=False)
            end_tokens = [tokenizer.eos_token_id, *model.stop_token_ids]
            turns = Turns(config.multi_turn, tokenizer, end_tokens, None, place.device_type)
        ends, measures = (model.stop_token_ids, model.stop), calculator is not None
        self.rollout = VLLMSampler(
            engine, config, place, model.max_response_length, *ends, measures, turns, trains=False
        )

    def start_generation(self) -> EngineCapacity:
        """Return the number of responses that the engine can sample at once."""
        return self.rollout.capacity
