"""Entry point of the export: ``python -m verl.trainer.main_export <checkpoint or run>``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, in our form or in that of ``python -m verl.model_merger``."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["merge"]:
        return _parse_merge(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="verl-export",
        description="Write the model of a checkpoint as transformers and vLLM load it.",
        epilog="In veRL's form: verl-export merge --backend fsdp --local_dir CHECKPOINT/actor --target_dir OUT",
    )
    parser.add_argument("source", type=Path, help="a checkpoint (.../global_step_N), or a run, whose latest is used")
    parser.add_argument("--out", type=Path, help="new folder to write (default: <checkpoint>/<part>/huggingface)")
    parser.add_argument("--part", choices=["actor", "critic"], default="actor", help="which model (default: actor)")
    own = "precision of the weights (default: that of the model that the run started from)"
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help=own)
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's folder")
    return parser.parse_args(arguments)


def _parse_merge(arguments: Sequence[str]) -> argparse.Namespace:
    """veRL's ``merge --backend fsdp --local_dir .../actor --target_dir out`` as our own arguments."""
    parser = argparse.ArgumentParser(prog="verl-export merge")
    parser.add_argument("--backend", choices=["fsdp"], required=True)
    parser.add_argument("--local_dir", type=Path, required=True, help="a checkpoint's part, .../global_step_N/actor")
    parser.add_argument("--target_dir", type=Path, required=True, help="new folder to write")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's folder")
    given = parser.parse_args(arguments)
    folder = given.local_dir.resolve()
    trust = given.trust_remote_code
    return argparse.Namespace(
        source=folder.parent, out=given.target_dir, part=folder.name, dtype=None, trust_remote_code=trust
    )


def main() -> None:
    """The command line."""
    arguments = parse_arguments()
    # Late, so that --help answers at once.
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
