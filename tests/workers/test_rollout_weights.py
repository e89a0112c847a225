"""How weights are handed to a vLLM engine, with a stand-in for it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none

from verl.workers.rollout.weights import reload_weights


class Model(nn.Linear):
    """Loads whatever it is given."""

    def load_weights(self, weights):
        return {name for name, _ in weights}


class Runner:
    """What of vLLM's model runner is used; its one layer asks for the config, as some kinds do."""

    def __init__(self) -> None:
        self.vllm_config = object()
        self.model = Model(2, 2)
        self.asked: list[object] = []

    def get_model(self) -> nn.Module:
        return self.model

    def reload_weights(self, weights_iterator):
        self.model.load_weights(weights_iterator)
        self.asked.append(get_current_vllm_config())


def test_layers_find_the_engine_s_config_while_they_prepare_new_weights():
    runner = Runner()
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    executor = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
    engine = SimpleNamespace(llm_engine=executor, reset_prefix_cache=lambda: True)
    reload_weights(engine, runner.model.named_parameters())
    assert runner.asked == [runner.vllm_config] and get_current_vllm_config_or_none() is None
    with pytest.raises(RuntimeError, match="was not given bias: it would sample with old"):
        reload_weights(engine, [("weight", torch.zeros(2, 2))])
