"""Entry point for model export: ``python -m verl.trainer.main_export <checkpoint or run>``."""

import argparse
from pathlib import Path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="verl-export", description="Write the model of a checkpoint as transformers and vLLM load it."
    )
    parser.add_argument("source", type=Path, help="a checkpoint (.../global_step_N), or a run, whose latest is used")
    parser.add_argument("--out", type=Path, help="new folder to write (default: <checkpoint>/<part>/huggingface)")
    parser.add_argument("--part", choices=["actor", "critic"], default="actor", help="which model (default: actor)")
    default = "precision of the weights (default: that of the model that the run started from)"
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help=default)
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's folder")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    # Import lazily, so that --help prints immediately.
    import torch

    from verl.checkpoint.export import export_checkpoint
    from verl.config.errors import ConfigError

    try:
        dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
        out = export_checkpoint(arguments.source, arguments.out, arguments.part, arguments.trust_remote_code, dtype)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    print(out)


if __name__ == "__main__":
    main()
