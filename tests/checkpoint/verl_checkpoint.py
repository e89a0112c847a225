"""Writes a checkpoint as veRL does: ``verl_checkpoint.py <model> <actor> <replicas>``.

Two workers of FSDP2 for each replica on a pretended process group: each saves its state dict of ``DTensor``.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def main(source: str, actor: Path, replicas: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    world = 2 * replicas
    sizes, names = ((2,), ("fsdp",)) if replicas == 1 else ((replicas, 2), ("ddp", "fsdp"))
    placements = [Replicate()] * (len(sizes) - 1) + [Shard(0)]
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        state = {}
        for name, value in model.state_dict().items():
            local = torch.chunk(value, 2)[rank % 2].clone()
            state[name] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        (actor / "huggingface").mkdir(parents=True, exist_ok=True)
        torch.save(state, actor / f"model_world_size_{world}_rank_{rank}.pt")
        dist.destroy_process_group()
    for part in (AutoConfig, AutoTokenizer, GenerationConfig):
        part.from_pretrained(source).save_pretrained(actor / "huggingface")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
