"""What the ranks of a test's world do with sharded models. Imports no vLLM, so that it starts fast."""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from verl.config.common import LoraConfig, ModelConfig, OptimConfig
from verl.models import loading
from verl.models.fsdp import full_parameters, offloaded_parameters, sharding_mesh
from verl.models.huggingface import checkpoint_parameters, empty_model, write_huggingface
from verl.models.info import ModelInfo
from verl.models.learner import Learner
from verl.models.loading import load_and_shard, load_sharded_model, load_sharded_value_model, pretrained_options
from verl.models.lora import adapters_disabled, export_adapters, is_adapter
from verl.models.offload import full_tensor, is_offloaded, local_part
from verl.utils import distributed

OPTIM = OptimConfig(
    1e-3, [0.9, 0.99], 1e-8, 0.1, "constant", 0, 0.0, min_lr_ratio=0.1, grad_clip=0.01, max_skipped_updates=4
)
"""With so low a bound every gradient is clipped."""


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def batch() -> Tensor:
    """[8, 12] tokens."""
    return torch.randint(7, 103, (8, 12), generator=torch.Generator().manual_seed(3))


def logprobs(model: nn.Module, ids: Tensor) -> Tensor:
    """Of all tokens but the first, [B, S-1]."""
    distribution = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(dim=-1)
    return distribution.gather(-1, ids[:, 1:, None]).squeeze(-1)


def token_values(model: nn.Module, ids: Tensor) -> Tensor:
    """Of all tokens, [B, S]."""
    return model(input_ids=ids, use_cache=False).logits.squeeze(-1).float()


@dataclass
class Outcome:
    """What a training run gives; tensors are whole, of rank 0 alone."""

    gradients: list[dict[str, Tensor]]
    norms: list[float]
    losses: list[float]
    weights: dict[str, Tensor]
    saved_bytes: int
    """Activations kept for the backward pass of one micro-batch."""


def train(config: ModelConfig, values: bool = False, steps: int = 2, **options: Any) -> Outcome | None:
    """Optimizer steps on one batch, with the options of a ``Trainee``."""
    trainee = Trainee(config, values, **options)
    outcome = Outcome([], [], [], {}, 0)
    for _ in range(steps):
        gradients, metrics = trainee.step()
        outcome.gradients.append(gradients)
        outcome.norms.append(metrics["grad_norm"])
        outcome.losses.append(metrics["loss"])
    outcome.saved_bytes = trainee.saved_bytes
    with trainee.parameters.loaded():
        outcome.weights = {name: value.clone() for name, value in full_parameters(trainee.model)}
    return outcome if dist.get_rank() == 0 else None


def computed_in(config: ModelConfig, parts: Sequence[str]) -> list[torch.dtype]:
    """Types in which parts of a trainable model compute."""
    trainee, found = Trainee(config), list[torch.dtype]()

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        found.append(output.dtype)

    for part in parts:
        trainee.model.get_submodule(part).register_forward_hook(note)
    trainee.step()
    return found


class Trainee:
    """A sharded model with its optimizer; a rank's share of the batch is split into ``num_micro`` micro-batches."""

    def __init__(
        self, config: ModelConfig, values: bool = False, num_micro: int = 2, clip: float = OPTIM.grad_clip
    ) -> None:
        torch.manual_seed(0)
        self.values, self.num_micro = values, num_micro
        load = load_sharded_value_model if values else load_sharded_model
        self.model = load(config, mesh(), trainable=True)
        self.parameters = offloaded_parameters(self.model, config.fsdp.param_offload)
        self.learner = Learner(self.model, replace(OPTIM, grad_clip=clip), 10, config.fsdp.optimizer_offload)
        self.learner.optimizer.register_step_pre_hook(self._keep_gradients)
        self.gradients: dict[str, Tensor] = {}
        self.saved_bytes = 0
        self.scale = 1.0

    def step(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        with self.parameters.loaded():
            share = batch().chunk(dist.get_world_size())[dist.get_rank()]
            sums, state = self.learner.step(share.chunk(self.num_micro), self._loss)
        return self.gradients, sums | state

    def _loss(self, micro: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.saved_bytes = 0
        with torch.autograd.graph.saved_tensors_hooks(self._count, lambda saved: saved):
            if self.values:
                errors = (token_values(self.model, micro) - 1.0) ** 2
            else:
                errors = -logprobs(self.model, micro)
            loss = self.scale * errors.sum() / batch().numel()
        return loss, {"loss": loss}

    def _count(self, saved: Tensor) -> Tensor:
        self.saved_bytes += saved.nbytes
        return saved

    def _keep_gradients(self, *_: Any) -> None:
        named = self.model.named_parameters()
        self.gradients = {name: full_tensor(p.grad).clone() for name, p in named if p.grad is not None}


def skipped(config: ModelConfig) -> list[tuple[list[dict[str, float]], dict[str, Tensor]]]:
    """Figures and weights of two updates, and of the same two with one between them that is not finite on rank 1."""
    found = []
    for scales in ((1.0, 1.0), (1.0, float("nan"), 1.0)):
        trainee, figures = Trainee(config, clip=1.0), []
        for scale in scales:
            trainee.scale = scale if dist.get_rank() == 1 else 1.0
            figures.append(trainee.step()[1])
        with trainee.parameters.loaded():
            found.append((figures, {name: value.clone() for name, value in full_parameters(trainee.model)}))
    return found


def mesh_layouts() -> list[list[list[int]]]:
    return [sharding_mesh(mesh(), size).mesh.tolist() for size in (1, 2)]


def time_limits() -> list[float]:
    """Seconds that messages among copies of a model, and within one, may take in a world whose limit is 300."""
    with patch.object(distributed, "_timeout", timedelta(seconds=300)):
        found = sharding_mesh.__wrapped__(mesh(), 2)
    backends = [found.get_group(name)._get_backend(torch.device("cpu")) for name in ("replicate", "shard")]
    return [backend.options._timeout.total_seconds() for backend in backends]


def loaded(config: ModelConfig) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor], list[int]]:
    """Where this rank built a model, its weights and buffers, and the elements of its parameters that it holds."""
    built: list[str] = []

    def build(device: str) -> Any:
        built.append(device)
        return AutoModelForCausalLM.from_pretrained(config.path, **pretrained_options(config, device))

    model = load_and_shard(build, config, mesh(), trainable=False)
    weights = {name: value.clone() for name, value in full_parameters(model)}
    return built, weights, dict(model.named_buffers()), [p.to_local().numel() for p in model.parameters()]


def offloaded(config: ModelConfig) -> dict[str, Any]:
    """Where things are at each stage of a run with everything offloaded."""
    trainee = Trainee(config)
    state = trainee.learner.optimizer_state
    parameters = list(trainee.model.parameters())
    found = {"parameters away at first": all(map(is_offloaded, parameters)), "errors": []}
    for use in (lambda: logprobs(trainee.model, batch()), lambda: next(full_parameters(trainee.model))):
        try:
            use()
        except RuntimeError as error:
            found["errors"].append(str(error))
    trainee.step()
    moments = [t for entry in trainee.learner.optimizer.state.values() for t in entry.values() if t.dim()]
    found["moments"] = len(moments)
    found["all away after a step"] = all(map(is_offloaded, [*parameters, *moments]))
    with trainee.parameters.loaded(), torch.no_grad():
        found["parameters back"] = not any(map(is_offloaded, parameters))
        found["moments not"] = all(map(is_offloaded, moments))
        logprobs(trainee.model, batch())
    # The forward pass left embedding and head whole on every rank.
    found["all away after a forward pass"] = all(map(is_offloaded, parameters))
    with state.loaded():
        found["moments back"] = not any(map(is_offloaded, moments))
    found["gradients"] = sum(p.grad is not None for p in trainee.model.parameters())
    return found


def constant_offload(config: ModelConfig) -> list[bool]:
    """Whether a frozen model says the same in each of its phases as one that stays."""
    stays, moves = (load_sharded_model(config, mesh(), trainable=False) for _ in range(2))
    parameters = offloaded_parameters(moves, enabled=True)
    same = []
    for _ in range(3):
        with parameters.loaded(), torch.no_grad():
            same.append(torch.equal(logprobs(moves, batch()), logprobs(stays, batch())))
    return [*same, all(map(is_offloaded, moves.parameters()))]


def streamed(config: ModelConfig) -> tuple[int, dict[str, Tensor]]:
    """How many gathered parameters exist at the same time, and what a rollout engine is given."""
    alive: list[weakref.ref[Tensor]] = []
    most, given = 0, {}
    for name, value in checkpoint_parameters(load_sharded_model(config, mesh(), trainable=True)):
        alive = [ref for ref in alive if ref() is not None] + [weakref.ref(value)]
        most, given[name] = max(most, len(alive)), value.clone()
        del value
    return most, given


def loading_peak(config: ModelConfig) -> tuple[int, int]:
    """Bytes that this rank's memory grew by at most while a model was loaded, and those of its shards."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here

    def resident(mark: str) -> int:
        return 1024 * int(Path("/proc/self/status").read_text().partition(f"{mark}:")[2].split(maxsplit=1)[0])

    before = resident("VmRSS")
    model = load_sharded_model(config, mesh(), trainable=True)
    return resident("VmHWM") - before, sum(local_part(p).nbytes for p in model.parameters())


def adapters(config: ModelConfig, values: bool, folder: Path) -> dict[str, Any]:
    """Train adapters and export them; each rank's own view."""
    trainee = Trainee(config, values)
    model, ids = trainee.model, batch()
    score = token_values if values else logprobs
    named = dict(model.named_parameters())
    trained = sorted(name for name, p in named.items() if p.requires_grad)
    before = {name: full_tensor(p).clone() for name, p in named.items()}
    with torch.no_grad():
        found: dict[str, Any] = {"trained": trained, "first": score(model, ids)}
    found["drawn"] = {name: value for name, value in before.items() if is_adapter(name)}
    for _ in range(3):
        trainee.step()
    found["moved"] = sorted(name for name, p in named.items() if not torch.equal(full_tensor(p), before[name]))
    with torch.no_grad():
        found["learned"] = score(model, ids)
        with adapters_disabled(model):
            found["disabled"] = score(model, ids)
        found["enabled again"] = score(model, ids)
    found["trained after"] = sorted(name for name, p in named.items() if p.requires_grad)
    weights = {name: value.cpu() for name, value in full_parameters(model)}
    if dist.get_rank() == 0:
        shell = empty_model("critic" if values else "actor", ModelInfo.of(config))
        write_huggingface(shell, weights, AutoTokenizer.from_pretrained(config.path), folder / "huggingface")
    dist.barrier()
    export_adapters(model, folder / "lora_adapter")
    auto, options = (AutoModelForTokenClassification, {"num_labels": 1}) if values else (AutoModelForCausalLM, {})
    with torch.no_grad():
        merged = auto.from_pretrained(folder / "huggingface", **options).eval()
        found["merged"] = score(merged, ids)
        adapted = PeftModel.from_pretrained(auto.from_pretrained(config.path, **options), folder / "lora_adapter")
        found["peft"] = score(adapted.eval(), ids)
    return found


class Odd(nn.Module):
    """Parameters whose rows hardly any number of ranks divides."""

    SHAPES = ((7, 3), (5,), (1, 6), (3, 2, 5), (2, 1), (64, 33))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(torch.randn(shape) for shape in self.SHAPES)


def halves_of_matrices(name: str, value: Tensor) -> torch.dtype:
    return torch.bfloat16 if value.dim() == 2 and value.dtype == torch.float32 else value.dtype


def odd_shapes_gathered(fsdp_size: int, bucket_bytes: int) -> tuple[int, list[bool]]:
    """Collectives, and whether each parameter has the bits of the whole one."""
    model = Odd()
    expected = {name: p.detach().clone().to(halves_of_matrices(name, p)) for name, p in model.named_parameters()}
    fully_shard(model, mesh=sharding_mesh(mesh(), fsdp_size))
    with CommDebugMode() as comm:
        found = {n: v.clone() for n, v in full_parameters(model, halves_of_matrices, bucket_bytes)}
    assert list(found) == list(expected)
    same = [found[n].dtype == v.dtype and torch.equal(found[n], v) for n, v in expected.items()]
    return comm.get_total_counts(), same


def copied_from_a_policy(config: ModelConfig) -> bool:
    """Whether a model that copies another's weights computes the same, with the files gone."""
    policy = load_sharded_model(config, mesh(), trainable=True)
    with patch.object(loading, "AutoModelForCausalLM") as files:
        files.from_pretrained = lambda path, device_map=None, **options: (
            AutoModelForCausalLM.from_pretrained(path, device_map=device_map, **options) if device_map else None
        )
        reference = load_sharded_model(config, mesh(), False, source=policy)
    assert not any(p.requires_grad for p in reference.parameters())
    return torch.equal(logprobs(policy, batch()).detach(), logprobs(reference, batch()))


def frozen(config: ModelConfig) -> dict[str, Any]:
    """What a model that does not learn computes and holds, beside one that does."""
    learns, rests = (load_sharded_model(config, mesh(), trainable) for trainable in (True, False))
    lora = replace(config, lora=LoraConfig(2, 4.0, ["q_proj"], 0.0))
    adapted = dict(load_sharded_model(lora, mesh(), trainable=True).named_parameters())
    found: dict[str, Any] = {
        "learns": {p.dtype for p in learns.parameters()},
        "rests": {p.dtype for p in rests.parameters()},
        "adapters": {p.dtype for name, p in adapted.items() if is_adapter(name)},
        "base": {p.dtype for name, p in adapted.items() if not is_adapter(name)},
    }
    with torch.no_grad():
        return found | {"same": torch.equal(logprobs(learns, batch()), logprobs(rests, batch()))}
