"""Writes a checkpoint as veRL does: ``verl_checkpoint.py <model> <actor>``.

Two workers of FSDP2 on a pretended process group: each saves its state dict of ``DTensor``.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def main(source: str, actor: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        state = {}
        for name, value in model.state_dict().items():
            local = torch.chunk(value, 2)[rank].clone()
            state[name] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
            )
        (actor / "huggingface").mkdir(parents=True, exist_ok=True)
        torch.save(state, actor / f"model_world_size_2_rank_{rank}.pt")
        dist.destroy_process_group()
    for part in (AutoConfig, AutoTokenizer, GenerationConfig):
        part.from_pretrained(source).save_pretrained(actor / "huggingface")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
