"""Count what a training step moves between processes: bytes and messages.

python benchmarks/bench_traffic.py --out benchmarks/traffic

No GPU and no network take part. Weights go through the code that gathers them for the engine, over models on the meta
device in a world of fake ranks, with the collective replaced by a counter. Batches are random ones of the full size,
pickled as Ray sends them.

Writes OUT.jsonl (how it was made, then each row) and OUT.md.
"""

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from bench_report import head, parser, provenance, table, write_report
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen2Config

from verl.batch import Batch
from verl.models import gather
from verl.models.fsdp import decoder_layers, full_parameters, sharding_mesh
from verl.models.gather import WeightDtype

MIB, GIB = 1 << 20, 1 << 30

MODELS = {
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "vocab_size": 152064},
}
"""Sizes of Qwen 2.5."""

WORLDS = [("7b", 8, -1), ("32b", 64, -1), ("32b", 64, 8)]
"""Model, GPUs, GPUs that hold one copy."""

PROMPTS, SAMPLES, PROMPT, RESPONSE = 128, 8, 1024, 8192

BUCKET_MB = 1024

MESSAGES = {
    "responses from engines": ["tokens", "rollout_logprobs", "group", "truncated"],
    "to the models that score them": ["tokens"],
    "the policy's scores": ["logprobs", "entropy"],
    "the reference's scores": ["ref_logprobs"],
    "to the update": ["tokens", "old_logprobs", "ref_logprobs", "advantages"],
    "to the update, without a reference": ["tokens", "old_logprobs", "advantages"],
}
"""Message of a step -> the columns in it."""


def bfloat16_matrices(name: str, value: Tensor) -> torch.dtype:
    """What travels for an engine in bfloat16 (verl.rollout.weight_sync.EngineDtype)."""
    return torch.bfloat16 if value.dim() > 1 and value.dtype == torch.float32 else value.dtype


@contextmanager
def fake_world(size: int) -> Iterator[Any]:
    """The mesh of a world whose other ranks do not exist."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    yield init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    sharding_mesh.cache_clear()
    dist.destroy_process_group()


def count_sync(model: torch.nn.Module, dtype: WeightDtype, bucket_bytes: int) -> dict[str, float]:
    """Collectives of a weight sync, bytes that each GPU gathers, and the bytes of the largest message."""
    sizes: list[int] = []

    def count(whole: Tensor, part: Tensor, group: Any) -> None:
        sizes.append(whole.nbytes)

    with patch.object(gather, "all_gather", count):
        for _ in full_parameters(model, dtype, bucket_bytes):
            pass
    return {"collectives": len(sizes), "gib": sum(sizes) / GIB, "largest_mib": max(sizes) / MIB}


def syncs() -> Iterator[dict[str, Any]]:
    """A row for each of ``WORLDS``."""
    for name, size, fsdp_size in WORLDS:
        with fake_world(size) as mesh:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(Qwen2Config(**MODELS[name], tie_word_embeddings=False))
            for part in (*decoder_layers(model), model):
                fully_shard(part, mesh=sharding_mesh(mesh, fsdp_size))
            place = {"model": name, "gpus": size, "shards": size if fsdp_size == -1 else fsdp_size}
            yield {"kind": "sync"} | place | count_sync(model, bfloat16_matrices, BUCKET_MB * MIB)


def response_lengths(kind: str) -> Tensor:
    """[B], all of the full length, or log-normal around an eighth of it."""
    size = PROMPTS * SAMPLES
    if kind == "full":
        return torch.full((size,), RESPONSE)
    torch.manual_seed(0)
    return (RESPONSE / 8 * torch.randn(size).mul(0.9).exp()).long().clamp(1, RESPONSE)


def example(lengths: Tensor) -> Batch:
    """A step's batch of responses of these lengths [B], with random numbers; advantages as GRPO's."""
    prompts, num_tokens = torch.full_like(lengths, PROMPT), int(lengths.sum())
    batch = Batch(prompts, lengths, RESPONSE, tokens=torch.randint(1, 152_064, (num_tokens + int(prompts.sum()),)))
    for name in ("rollout_logprobs", "logprobs", "entropy", "old_logprobs", "ref_logprobs"):
        batch.fill(**{name: -torch.rand(num_tokens)})
    batch.fill(group=torch.arange(PROMPTS).repeat_interleave(SAMPLES), truncated=lengths == RESPONSE)
    return batch.fill(advantages=torch.randn(len(lengths)).repeat_interleave(lengths))


def sent_mib(message: Any) -> float:
    """MiB of anything that is sent between processes."""
    return len(pickle.dumps(message, protocol=5)) / MIB


def page(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    weights = [
        [row["model"], str(row["gpus"]), str(row["shards"]), str(row["collectives"]), f"{row['gib']:.1f}"]
        + [f"{row['largest_mib']:.0f}"]
        for row in rows
        if row["kind"] == "sync"
    ]
    batches = [
        [row["message"], *(f"{row[kind]:.1f}" for kind in ("full", "log-normal"))]
        for row in rows
        if row["kind"] == "batch"
    ]
    columns = ["model", "GPUs:", "shards of a copy:", "collectives:", "GiB to each GPU:", "largest message, MiB:"]
    return f"""{head("What a step moves between processes", facts)}\
## Weights to the engines

Each GPU gathers whole parameters for its engine, cast to bfloat16, in buckets of {BUCKET_MB} MiB. A parameter that is
larger has a bucket of its own.

{table(columns, weights)}
## Batches between driver and workers

{PROMPTS} prompts of {PROMPT} tokens with {SAMPLES} responses of up to {RESPONSE}, in MiB; other numbers of responses in
proportion. All of the full length, or log-normal with a median of an eighth of it. Without importance sampling
(`actor.tis_level=none`).

{table(["message", "full:", "log-normal:"], batches)}"""


def main(argv: list[str]) -> None:
    """Count and write the report."""
    options = parser(__doc__).parse_args(argv)
    batches = {kind: example(response_lengths(kind)) for kind in ("full", "log-normal")}
    rows = [
        *syncs(),
        *(
            {"kind": "batch", "message": message}
            | {kind: sent_mib(batch.columns(*columns)) for kind, batch in batches.items()}
            for message, columns in MESSAGES.items()
        ),
    ]
    what = "Counted, not timed: shapes and code are real, ranks and weights are not."
    write_report(options.out, provenance("bench_traffic.py", argv) | {"what": what}, rows, page)


if __name__ == "__main__":
    main(sys.argv[1:])
