"""How weights are handed to a vLLM engine, with a stand-in for it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from verl.config import ConfigError
from verl.rollout.vllm_engine import check_engine_kwargs
from verl.rollout.vllm_rollout import check_native_class
from verl.rollout.weight_sync import engine_dtype, reload_weights


class Model(nn.Linear):
    """Loads whatever it is given, and has experts whose weights are packed."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.experts = nn.Identity()
        self.packed: list[nn.Module] = []
        fused = SimpleNamespace(process_weights_after_loading=self.packed.append)
        self.experts.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=fused))

    def load_weights(self, weights):
        return {name for name, _ in weights}


class Runner:
    """What of vLLM's model runner is used; its one layer asks for the config, as some kinds do."""

    def __init__(self) -> None:
        self.vllm_config = object()
        self.model = Model()
        self.asked: list[object] = []

    def get_model(self) -> nn.Module:
        return self.model

    def reload_weights(self, weights_iterator):
        self.model.load_weights(weights_iterator)
        self.asked.append(get_current_vllm_config())


def engine_with(runner: Runner) -> SimpleNamespace:
    engine = SimpleNamespace(model_runner=runner)
    for name in ("worker", "driver_worker", "model_executor", "llm_engine"):
        engine = SimpleNamespace(**{name: engine}, reset_prefix_cache=lambda: True)
    return engine


def test_layers_find_the_engine_config_while_loading():
    runner = Runner()
    engine = engine_with(runner)
    reload_weights(engine, runner.model.named_parameters())
    assert runner.asked == [runner.vllm_config] and get_current_vllm_config_or_none() is None
    with pytest.raises(RuntimeError, match="was not given bias: it would sample with old"):
        reload_weights(engine, [("weight", torch.zeros(2, 2))])


@pytest.mark.parametrize("on_cpu", [True, False])
def test_experts_are_packed_again_on_a_cpu(on_cpu, monkeypatch):
    runner = Runner()
    monkeypatch.setattr(current_platform, "is_cpu", lambda: on_cpu)
    reload_weights(engine_with(runner), runner.model.named_parameters())
    assert runner.model.packed == ([runner.model.experts] if on_cpu else [])
    # They count as given under the name that some versions report.
    runner.model.mlp = nn.ModuleDict({"routed_experts": nn.Linear(2, 2, bias=False)})
    assert "mlp.routed_experts.weight" in dict(runner.model.named_parameters())
    reload_weights(engine_with(runner), [(name, torch.zeros(2, 2)) for name in ("weight", "bias", "mlp.weight")])


def test_weights_travel_as_the_engine_holds_them():
    runner = Runner()
    runner.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    runner.model = nn.ModuleDict(
        {"moe": nn.ModuleDict({"gate": nn.Linear(4, 2)}), "up_proj": nn.Linear(4, 2).bfloat16()}
    )
    dtype = engine_dtype(engine_with(runner))
    wanted = {
        ("model.layers.0.mlp.up_proj.weight", (2, 4)): torch.bfloat16,
        ("model.layers.0.mlp.experts.gate_up_proj", (3, 2, 4)): torch.bfloat16,
        # The engine keeps this one in float32, under another path.
        ("model.layers.0.mlp.gate.weight", (2, 4)): torch.float32,
        # A norm; and what a state-space model computes with before it rounds.
        ("model.norm.weight", (4,)): torch.float32,
        ("model.layers.0.mixer.A_log", (2, 4)): torch.float32,
    }
    assert {key: dtype(key[0], torch.zeros(key[1])) for key in wanted} == wanted
    # What is narrower already stays so, also for an engine in float32.
    assert dtype("a.up_proj.weight", torch.zeros(2, 4, dtype=torch.bfloat16)) == torch.bfloat16
    assert (
        replace(dtype, dtype=torch.float32)("a.up_proj.weight", torch.zeros(2, 4, dtype=torch.bfloat16))
        == torch.bfloat16
    )


class Mixture(nn.Module):
    """Loads what vLLM is given, and the experts of one layer as its own layer does."""

    def __init__(self, held: int, gated: bool) -> None:
        super().__init__()
        self.given: list[tuple[str, tuple[int, ...]]] = []
        layer = self.experts = nn.Module()
        plain = object.__new__(UnquantizedFusedMoEMethod)
        nn.Module.__init__(plain)
        layer.quant_method = plain
        layer.moe_config = SimpleNamespace(is_act_and_mul=gated)
        for kind in ("w13_weight", "w2_weight"):
            layer.register_parameter(kind, nn.Parameter(torch.zeros(held, 1)))
            getattr(layer, kind).weight_loader = self.load_stack

    def load_stack(self, param, loaded_weight, weight_name, shard_id, expert_id, return_success) -> bool:
        assert param is getattr(self.experts, weight_name) and expert_id == 0 and return_success
        self.given.append((f"{weight_name} {shard_id}", tuple(loaded_weight.shape)))
        return True

    def load_weights(self, weights):
        self.given += [(name, tuple(value.shape)) for name, value in weights]
        return set()


STACKS = [("experts.*.gate_proj.weight", 5), ("experts.*.w3.weight", 5), ("experts.*.down_proj.weight", 4), ("norm", 3)]


@pytest.mark.parametrize(
    ("held", "gated", "given"),
    [
        (2, True, [("w13_weight w1", (2, 5)), ("w13_weight w3", (2, 5)), ("w2_weight w2", (2, 4)), ("norm", (3,))]),
        # A process that holds some of the experts picks them by their numbers; one matrix alone is called up_proj too.
        (1, True, "by number"),
        (2, False, "by number"),
    ],
)
def test_stacked_experts_take_one_loader_call_a_matrix(held, gated, given):
    runner = Runner()
    runner.model = Mixture(held, gated)
    weights = [(name, torch.zeros(2, size) if "*" in name else torch.zeros(size)) for name, size in STACKS]
    if given != "by number":
        reload_weights(engine_with(runner), weights)
        assert runner.model.given == given
        return
    with pytest.raises(RuntimeError, match="was not given experts.w13_weight, experts.w2_weight"):
        reload_weights(engine_with(runner), weights)
    assert runner.model.given == [
        *((name.replace("*", str(i)), (size,)) for name, size in STACKS[:3] for i in range(2)),
        ("norm", (3,)),
    ]


def test_models_that_vllm_borrows_from_transformers_are_refused():
    class TransformersForCausalLM(nn.Module):
        config = SimpleNamespace(model_type="olmo2")

    runner = Runner()
    check_native_class(engine_with(runner), "folder")
    runner.model = TransformersForCausalLM()
    message = r"^model.path='folder': vLLM .* has no native class for olmo2 .* rollout.name=hf$"
    with pytest.raises(ValueError, match=message):
        check_native_class(engine_with(runner), "folder")


def test_unknown_engine_argument_is_refused():
    known = {"block_size": 32, "quantization": None, "compilation_config": {"level": 0}}
    assert check_engine_kwargs(known) == known
    message = r"^rollout\.engine_kwargs\.blocksize=32: vLLM .* has no such argument; did you mean block_size\?$"
    with pytest.raises(ConfigError, match=message):
        check_engine_kwargs({"blocksize": 32})
