"""TRL's side of bench_step.py: GRPOTrainer on the same prompts, rewarded by the same verifier, in TRL's environment."""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_report import timed
from datasets import Dataset, load_dataset
from step_floor import GENERATION, SCORING, UPDATE
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from turns import wait_for_turn

from verl.rewards import compute_score


class Turns(TrainerCallback):  # type: ignore[misc]  # of a package that is not installed here
    """Waits before each generation."""

    def __init__(self, updates: int, record: Path) -> None:
        self.updates = updates
        self.record = record
        self.phases: dict[str, float] = {}
        """Phase -> its seconds since the last optimizer step; what remains is the update's."""
        self.since = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step of ours is ``updates`` optimizer steps of TRL."""
        if state.global_step % self.updates == 0:
            if state.is_world_process_zero:
                wait_for_turn()
            if dist.is_initialized():
                dist.barrier()
            self.since = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Keep what TRL logs."""
        if not state.is_world_process_zero:
            return
        now = time.perf_counter()
        phases = self.phases | {UPDATE: now - self.since - sum(self.phases.values())}
        self.phases.clear()
        self.since = now
        with self.record.open("a") as file:
            file.write(json.dumps({"step": state.global_step, "phases": phases} | logs) + "\n")


class Timed(GRPOTrainer):  # type: ignore[misc]  # of a package that is not installed here
    """TRL's trainer, which tells how long it generates and scores."""

    def _timed(self, phase: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        seconds, result = timed(partial(call, *args, **kwargs))
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        return result

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(GENERATION, super()._generate, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        call = super()._get_per_token_logps_and_entropies
        if torch.is_grad_enabled():
            return call(*args, **kwargs)
        return self._timed(SCORING, call, *args, **kwargs)


def prompts_of(path: str) -> Dataset:
    """The rows in the form that TRL reads."""
    rows = load_dataset("parquet", data_files=path, split="train")

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        truth = json.dumps(row["reward_model"]["ground_truth"])
        return {"prompt": row["prompt"], "source": row["data_source"], "truth": truth}

    return rows.map(convert, remove_columns=[name for name in rows.column_names if name != "prompt"])


def main(options: dict[str, Any]) -> None:
    """Train until the process is stopped."""
    torch.set_num_threads(options["threads"])

    def reward(completions: list[Any], source: list[str], truth: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [
            compute_score(name, text, json.loads(t), mode="mix")["score"]
            for name, text, t in zip(source, texts, truth, strict=True)
        ]

    rows = options["prompts"] * options["samples"] // options["processes"]
    on_gpu = options["device"] == "cuda"
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4} if on_gpu else {}
    config = GRPOConfig(
        output_dir=options["folder"],
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=False,
        per_device_train_batch_size=options["micro_batch"],
        gradient_accumulation_steps=rows // options["updates"] // options["micro_batch"],
        steps_per_generation=rows // options["micro_batch"],
        num_generations=options["samples"],
        max_completion_length=options["tokens"],
        max_steps=10**6,
        shuffle_dataset=False,
        temperature=options["temperature"],
        beta=options["kl_coef"],
        loss_type="dapo",
        learning_rate=options["lr"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **vllm,
    )
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16 if on_gpu else torch.float32)
    turns = Turns(options["updates"], Path(options["folder"]) / "log.jsonl")
    trainer = Timed(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=prompts_of(options["train_file"]),
        processing_class=AutoTokenizer.from_pretrained(options["model"]),
        callbacks=[turns],
    )
    trainer.phases = turns.phases
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
