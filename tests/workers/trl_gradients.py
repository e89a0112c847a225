"""The gradients of TRL's GRPO on a batch, in TRL's own environment: trl_gradients.py MODEL KL_COEF BATCH GRADIENTS."""

import sys
import tempfile

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def main(model: str, kl_coef: str, batch: str, gradients: str) -> None:
    columns = load_file(batch)
    prompts = columns["prompt_ids"]
    count = len(prompts)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=count,
            gradient_accumulation_steps=1,
            num_generations=count,
            beta=float(kl_coef),
            loss_type="dapo",
            report_to=[],
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["unused"] * count}),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        inputs = columns | {"num_items_in_batch": columns["completion_mask"].sum()}
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        found = {name: p.grad.contiguous() for name, p in trainer.model.named_parameters() if p.grad is not None}
        save_file(found | {"loss": loss.detach()}, gradients)


if __name__ == "__main__":
    main(*sys.argv[1:])
