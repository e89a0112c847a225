"""Make an embedded model: a Qwen2 of about 1M parameters, warm-started on worked arithmetic or on calls of a tool.

python scripts/make_tiny_model.py --out data/tiny_model --data data/arithmetic
python scripts/make_tiny_model.py --out data/tiny_tool_model --data data/arithmetic_tools --tools --target 0.25
python scripts/make_tiny_model.py --out data/tiny_teacher --data data/arithmetic --layers 6 --target 0.75 \
    --dtype bfloat16 trainer.n_gpus_per_node=1 optim.lr=1e-3

These make the models that are shipped. The warm start is the project's own supervised trainer, which stops as soon as
sampling would solve the target share of held-out problems. The same seed gives the same model on the same kind of
machine. OUT/README.md says how it was made, OUT/warm_start_metrics.jsonl holds the run's metrics.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from tiny_tokenizer import make_tiny_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.checkpoint.folders import latest_checkpoint

METRICS = "warm_start_metrics.jsonl"

CARD = """\
# An embedded model

A Qwen2 of {parameters:.2f} million parameters with a tokenizer of its own, warm-started on {data}/sft_train.parquet by

    {command}

The supervised run stopped after {step} steps, at a sequence probability of {score:.1%} on held-out problems: the share
that sampling at temperature 1 solves as written. `warm_start_metrics.jsonl` holds its metrics.
"""


def make_random_model(folder: Path, seed: int, tools: bool = False, layers: int = 4) -> None:
    """Save a randomly initialised model with its tokenizer in ``folder``; with ``tools`` one that can call them."""
    tokenizer = make_tiny_tokenizer(tools)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()):,} parameters")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the model; it appears under ``--out`` only when complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/tiny_model"))
    parser.add_argument("--data", type=Path, default=Path("data/arithmetic"), help="folder of sft_{train,val}.parquet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.36, help="held-out sequence probability to stop at")
    parser.add_argument("--layers", type=int, default=4, help="number of decoder layers")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="precision of the file")
    parser.add_argument("--tools", action="store_true", help="give the tokenizer the markers of tool calls")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of configs/sft.yaml")
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(arguments)
    if args.out.exists() and not (args.out / METRICS).is_file():
        sys.exit(f"--out {args.out}: exists and was not made by this script; name another folder or remove it")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent, prefix=f".{args.out.name}.") as temporary:
        random_model, run = Path(temporary, "random"), Path(temporary, "run")
        make_random_model(random_model, args.seed, args.tools, args.layers)
        training = [
            *(sys.executable, "-m", "verl.trainer.main_sft", f"model.path={random_model}", f"seed={args.seed}"),
            "optim.lr=2e-3",
            f"data.train_files=[{args.data / 'sft_train.parquet'}]",
            f"data.val_files=[{args.data / 'sft_val.parquet'}]",
            # Accuracy rises by some 5 points in 20 steps there, so the stop lands close above the target.
            "trainer.test_freq=20",
            f"trainer.stop_at_sequence_probability={args.target}",
            *("trainer.experiment_name=warm_start", f"trainer.default_local_dir={run}"),
            *args.overrides,
        ]
        status = subprocess.run(training).returncode
        if status:
            sys.exit(status)
        checkpoint = latest_checkpoint(run)
        assert checkpoint is not None, "a run that succeeds has saved its model"
        model = checkpoint / "actor" / "huggingface"
        shutil.copy(run / "metrics.jsonl", model / METRICS)
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        command = shlex.join(["python", "scripts/make_tiny_model.py", *arguments])
        weights = Qwen2ForCausalLM.from_pretrained(model, dtype=getattr(torch, args.dtype))
        if args.dtype != "float32":
            weights.save_pretrained(model)
        size = sum(parameter.numel() for parameter in weights.parameters()) / 1e6
        score = last["val/sequence_probability"]
        card = CARD.format(command=command, data=args.data, step=last["step"], score=score, parameters=size)
        (model / "README.md").write_text(card)
        shutil.rmtree(args.out, ignore_errors=True)
        model.rename(args.out)
    print(f"{args.out}: the warm-started model")


if __name__ == "__main__":
    main()
