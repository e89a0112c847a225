"""Peak memory of a sharded model on fake GPUs: the real sharding and forward pass, tensors without numbers.

python -m tests.pretend_cuda.memory MODEL_FOLDER WORKERS TOKENS ROWS

Prints, for scoring and for the backward pass of a micro-batch of packed rows on one of so many workers, the peak that
torch's tracker sees and what ``verl.run.memory`` estimates, in GB. AdamW's step is left out: on fake tensors the
tracker counts temporaries that a fused step does not make.
"""

import json
import sys
from typing import Any
from unittest import mock

from tests.pretend_cuda import stub  # isort: skip  # before torch

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401  # lets the tracker see collectives
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from tests.pretend_cuda.pretend import OF_TORCH_CUDA, Stream
from verl.batch import Batch
from verl.config import PPOConfig, load_config
from verl.models.attention import attention_name
from verl.models.fsdp import shard_model, sharding_mesh
from verl.models.output_head import Scoring, ScoringTargets, chunk_output_head
from verl.models.packing import packed_layout
from verl.run.memory import GB, estimate

assert stub


class FakeEvent:
    """Everything has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: True


class FakeStream(Stream):
    """The one stream, whose events carry nothing."""

    def record_event(self, event: Any = None) -> Any:
        return event or FakeEvent()


def options(path: str, workers: int, tokens: int) -> PPOConfig:
    """A run that learns from so many packed tokens at a time, without what would add to the policy's own memory."""
    sizes = [f"actor.{name}={tokens}" for name in ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu")]
    packed = ["model.use_remove_padding=true", "actor.use_dynamic_bsz=true", "model.share_prompts=false"]
    more = ["model.param_dtype=bfloat16", "model.gradient_checkpointing=true", "model.logits_chunk_size=1024"]
    more += ["actor.use_kl_loss=false", "actor.entropy_coeff=0", "model.fsdp.optimizer_offload=true"]
    more += ["data.max_prompt_length=512", "data.max_response_length=1536", f"trainer.n_gpus_per_node={workers}"]
    return load_config(PPOConfig, "ppo_trainer", [f"model.path={path}", *sizes, *packed, *more])


def peak(tracker: MemTracker) -> float:
    """GB on the fake GPU."""
    snapshot = tracker.get_tracker_snapshot("peak")
    return max(float(held["Total"]) for device, held in snapshot.items() if device.type == "cuda") / GB


def main(path: str, workers: int, tokens: int, rows: int) -> dict[str, dict[str, float]]:
    """Phase -> ``tracked`` and ``estimated``."""
    dist.init_process_group("fake", rank=0, world_size=workers, store=FakeStore())
    mesh, config = init_device_mesh("cuda", (workers,), mesh_dim_names=("dp",)), options(path, workers, tokens)
    length = tokens // rows
    batch = Batch.of([[1] * (length // 4)] * rows, [[1] * (length - length // 4)] * rows)
    layout, places = packed_layout(batch), batch.predictors
    parts = estimate(config, 80.0, {"model": AutoConfig.from_pretrained(path)})
    left_out = {"moments", "context", "engine"}
    expected = {
        name: sum(size for part, size in parts[phase].items() if part not in left_out)
        for name, phase in (("scoring", "logprobs"), ("backward", "update, backward"))
    }
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with torch.device("meta"):
            made = AutoConfig.from_pretrained(path)
            model = AutoModelForCausalLM.from_config(
                made, dtype=torch.float32, attn_implementation=attention_name(config.model)
            )
        shard_model(model, config.model, sharding_mesh(mesh, -1), trainable=True)
        model.to_empty(device="cuda")
        model.eval()
        chunk_output_head(model, config.model.logits_chunk_size)

        def there(values: Any) -> Any:
            return torch.empty(values.shape, dtype=values.dtype, device="cuda") if torch.is_tensor(values) else values

        found = {}
        for name, learns in (("scoring", False), ("backward", True)):
            tracker = MemTracker()
            tracker.track_external(model)
            with tracker, torch.set_grad_enabled(learns):
                inputs = {key: there(value) for key, value in layout.inputs.items()}
                targets = ScoringTargets(there(places), there(places), Scoring(1.0))
                logprobs = model(**inputs, use_cache=False, targets=targets)[0]
                if learns:
                    logprobs.sum().backward()
            found[name] = {"tracked": peak(tracker), "estimated": expected[name]}
            if not learns:
                model.reshard()
        assert mode
    return found


if __name__ == "__main__":
    stubs = OF_TORCH_CUDA | {"Event": FakeEvent, "Stream": FakeStream, "synchronize": lambda *_: None}
    stubs |= {name: lambda *_: FakeStream() for name in ("current_stream", "default_stream")}
    with mock.patch.multiple(torch.cuda, **stubs):
        print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
