"""Count what a training step moves between processes: bytes and messages, before they were packed and now.

python benchmarks/bench_traffic.py --out benchmarks/traffic

No GPU and no network take part. Weights go through the code that gathers them for the engine, over models on the meta
device in a world of fake ranks, with the collective replaced by a counter. Batches are random ones of the full size:
what the roles of the trainer hand to their workers is packed and measured. "Before" is one collective a parameter in
float32, and batches as dense tensors, one copy for every worker of an engine.

Writes OUT.jsonl (how it was made, then each row) and OUT.md.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from bench_report import provenance, write_report
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen2Config

from verl.models import gather
from verl.models.fsdp import decoder_layers, full_parameters, sharding_mesh
from verl.models.gather import WeightDtype, as_it_is
from verl.protocol import PolicyBatch, PolicyScores, PromptBatch, RankMetrics, RolloutBatch
from verl.single_controller.wire import num_bytes, pack

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

WITHOUT_KL = "policy batch without a reference"

PROMPTS, SAMPLES, PROMPT, RESPONSE = 128, 8, 1024, 8192

BUCKET_MB = 1024


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

    def noted(whole: Tensor, own: Tensor, group: Any) -> None:
        sizes.append(whole.nbytes)

    with patch.object(gather, "all_gather", noted):
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
            yield {
                "kind": "sync",
                "model": name,
                "gpus": size,
                "shards": size if fsdp_size == -1 else fsdp_size,
                "before": count_sync(model, as_it_is, 0),
                "after": count_sync(model, bfloat16_matrices, BUCKET_MB * MIB),
            }


def response_lengths(kind: str) -> Tensor:
    """[B], all of the full length, or log-normal around an eighth of it."""
    size = PROMPTS * SAMPLES
    if kind == "full":
        return torch.full((size,), RESPONSE)
    torch.manual_seed(0)
    return (RESPONSE / 8 * torch.randn(size).mul(0.9).exp()).long().clamp(1, RESPONSE)


def example(lengths: Tensor) -> tuple[PromptBatch, RolloutBatch, PolicyScores]:
    """A step's prompts, responses to them, and what the policy says of those."""
    size, columns = len(lengths), torch.arange(PROMPT + RESPONSE)
    attention = (columns < PROMPT + lengths[:, None]).long()
    mask = attention[:, PROMPT:].clone()
    ids = torch.randint(1, 152_064, attention.shape) * attention
    ids[:, :PROMPT] = ids[::SAMPLES, :PROMPT].repeat_interleave(SAMPLES, dim=0)

    def numbers() -> Tensor:
        return torch.where(mask.bool(), -torch.rand(mask.shape), 0.0)

    none = RankMetrics.none(size)
    uid = torch.arange(PROMPTS)
    prompts = PromptBatch(ids[::SAMPLES, :PROMPT], attention[::SAMPLES, :PROMPT], uid, batch_size=[PROMPTS])
    truncated = lengths == RESPONSE
    group_ids = uid.repeat_interleave(SAMPLES)
    rollout = RolloutBatch(ids, attention, mask, numbers(), group_ids, truncated, none, batch_size=[size])
    return prompts, rollout, PolicyScores(numbers(), numbers(), none, batch_size=[size])


def dense_bytes(batch: Any) -> int:
    """Bytes of all tensors of a batch."""
    if isinstance(batch, Tensor):
        return batch.nbytes
    return sum(int(value.nbytes) for value in batch.to_tensordict().flatten_keys().values())


def payloads() -> Iterator[dict[str, Any]]:
    """A row for each message of a step and each distribution of lengths."""
    for kind in ("full", "log-normal"):
        prompts, rollout, scores = example(response_lengths(kind))
        ref, mask = scores.entropy.clone(), rollout.response_mask
        advantages = torch.where(mask.bool(), torch.randn(len(mask), 1), 0.0)
        rows = (rollout.input_ids, rollout.attention_mask, mask, scores.logprobs)
        old = PolicyBatch(*rows, rollout.rollout_logprobs, ref, advantages, batch_size=[len(mask)])
        # Without importance sampling nothing reads the engine's; without a KL term nothing reads the reference's.
        new = old.replace(rollout_logprobs=scores.logprobs)
        scored = rollout.exclude("rank_metrics", "rollout_logprobs")
        messages = {
            "prompts to engines": (prompts, prompts),
            "responses from engines": (rollout, rollout),
            "to score, twice": (rollout.exclude("rank_metrics"), scored),
            "policy's scores": (scores, scores),
            "reference's scores": (ref, ref),
            "policy batch": (old, new),
            WITHOUT_KL: (old, new.replace(ref_logprobs=scores.logprobs)),
        }
        for name, (before, after) in messages.items():
            times = 2 if name.endswith("twice") else 1
            yield {
                "kind": "batch",
                "lengths": kind,
                "message": name,
                "before_mib": times * dense_bytes(before) / MIB,
                "after_mib": times * num_bytes(pack(after)) / MIB,
            }


def step_mib(rows: Sequence[Mapping[str, Any]], lengths: str, column: str, engine: int) -> float:
    """MiB of a step with a reference: ``column`` of the messages, with engines of so many GPUs."""
    # Each of an engine's GPUs was sent its share before.
    copies = engine if column == "before_mib" else 1
    messages = [row for row in rows if row["kind"] == "batch" and row["lengths"] == lengths]
    found = [row for row in messages if row["message"] != WITHOUT_KL]
    return float(sum(row[column] * (copies if "engines" in row["message"] else 1) for row in found))


def page(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The report in Markdown."""
    lines = ["# What a step moves between processes", ""]
    lines += [f"torch {facts['torch']}, {facts['date']}. {facts['what']}", "", "Regenerate with", ""]
    lines += [f"    {facts['command']}", "", "## Weights to the engines", ""]
    lines += [
        "Each GPU gathers whole parameters for its engine: before, one collective a parameter in float32; now, cast to",
        f"bfloat16, in buckets of {facts['bucket_mb']} MiB. A parameter that is larger has a bucket of its own.",
        "",
        "| model | GPUs | shards of a copy | collectives | GiB to each GPU | largest message, MiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if row["kind"] == "sync":
            before, after = row["before"], row["after"]
            lines.append(
                f"| {row['model']} | {row['gpus']} | {row['shards']} "
                f"| {before['collectives']} -> {after['collectives']} | {before['gib']:.1f} -> {after['gib']:.1f} "
                f"| {before['largest_mib']:.0f} -> {after['largest_mib']:.0f} |"
            )
    lines += ["", "## Batches between driver and workers", ""]
    lines += [
        f"{PROMPTS} prompts of {PROMPT} tokens with {SAMPLES} responses of up to {RESPONSE}, in MiB; other numbers of",
        "responses in proportion. All of the full length, or log-normal with a median of an eighth of it. Without",
        "importance sampling (`actor.tis_level=none`). With sequence parallelism or an engine of several GPUs each",
        "share used to be sent, and each result returned, once for every GPU that works on it; now once.",
        "",
        "| message | full: before | now | log-normal: before | now |",
        "|---|---:|---:|---:|---:|",
    ]
    found = {(row["message"], row["lengths"]): row for row in rows if row["kind"] == "batch"}
    messages = list(dict.fromkeys(message for message, _ in found))
    for message in messages:
        cells = [found[message, kind] for kind in ("full", "log-normal")]
        numbers = " | ".join(f"{cell['before_mib']:.1f} | {cell['after_mib']:.1f}" for cell in cells)
        lines.append(f"| {message} | {numbers} |")
    for title, engine in (("a step", 1), ("a step, engines of 4 GPUs", 4)):
        columns = [(kind, column) for kind in ("full", "log-normal") for column in ("before_mib", "after_mib")]
        sums = [f"{step_mib(rows, kind, column, engine):.0f}" for kind, column in columns]
        lines.append(f"| **{title}** | {' | '.join(sums)} |")
    return "\n".join([*lines, ""])


def main(argv: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="path of OUT.jsonl and OUT.md without suffix")
    options = parser.parse_args(argv)
    rows = [*syncs(), *payloads()]
    what = "Counted, not timed: shapes and code are real, ranks and weights are not."
    facts = provenance("bench_traffic.py", argv) | {"what": what, "bucket_mb": BUCKET_MB}
    write_report(options.out, facts, rows, page)
    print(page(facts, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
