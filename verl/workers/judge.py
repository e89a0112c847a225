"""Worker of a frozen judge, which runs a vLLM engine that sleeps when it is not in use."""

from verl.config.ppo import PPOConfig
from verl.models.hub import local_folder
from verl.models.info import ModelInfo
from verl.models.tokenizer import load_tokenizer
from verl.rollout.queue import EngineCapacity
from verl.rollout.vllm_engine import start_engine
from verl.rollout.vllm_sampler import VLLMSampler
from verl.utils.distributed import WorkerPlace, join_world, seed_everything
from verl.utils.process import set_stage


class JudgeWorker:
    """One of the processes that run the engines of a frozen judge on the same devices as the trainer's workers."""

    def __init__(self, config: PPOConfig, place: WorkerPlace) -> None:
        """Start the engine, load the model's weights, and put the engine to sleep."""
        set_stage("starting the judge's engine")
        seed_everything(config.seed)
        join_world(place)
        judge, own = config.reward_score.judge, config.reward_score.judge.model
        assert own.path is not None, "JudgeConfig.is_frozen"
        options = config.judge_engine(place.device_type)
        folder, trust = local_folder(own.path), own.trust_remote_code
        # Unlike the policy's, these weights never change: they wait in host memory (level 1).
        self.sleeps = place.device_type == "cuda"
        sizes = (judge.max_length, trust, config.seed)
        engine = start_engine(folder, place, options, *sizes, None, enable_sleep_mode=self.sleeps)
        ends = ModelInfo.read(folder, trust).end_tokens(load_tokenizer(folder, trust, needs_chat_template=False))
        self.rollout = VLLMSampler(engine, options, place, judge.max_tokens, ends, [], False, None, trains=False)
        self.awake = True
        self.finish_generation()

    def start_generation(self) -> EngineCapacity:
        """Wake the engine, and return the number of answers that it can sample at once."""
        if self.sleeps and not self.awake:
            self.rollout.engine.wake_up()
        self.awake = True
        self.rollout.begin()
        return self.rollout.capacity

    def finish_generation(self) -> None:
        """Free the engine's memory on a GPU until the next :meth:`start_generation`."""
        if self.sleeps and self.awake:
            self.rollout.engine.sleep(level=1)
        self.awake = False
