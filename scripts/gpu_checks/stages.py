"""The stages of scripts/check_gpu.py, the most informative first, and the process that runs one of them.

python -m gpu_checks.stages STAGE --device cuda --out FOLDER --result FILE [--toy]

A stage returns an ``Outcome``, or raises ``Failed`` or ``Skipped``. The numbers come from what users run: the training
command, the tests marked ``gpu``, and the scripts that measure.
"""

import argparse
import json
import pkgutil
import sys
import tomllib
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_checks.common import FAILED, PASSED, SKIPPED, Context, Failed, Outcome, Record, Skipped, require_gpu

TABLE = Path(__file__).with_name("stages.toml")


class Stage(NamedTuple):
    """One check; stages.toml describes the fields."""

    name: str
    what: str
    function: str
    to_do: str
    gpu_tests: Sequence[str] = ()
    cpu_tests: Sequence[str] = ()


STAGES = tuple(Stage(**entry) for entry in tomllib.loads(TABLE.read_text())["stages"])


def run(context: Context) -> Record:
    """Status, and the figure or the reason."""
    (function,) = [stage.function for stage in STAGES if stage.name == context.stage]
    try:
        # The first stage looks at the packages before that.
        if context.on_gpu and context.stage != STAGES[0].name:
            require_gpu()
        # Imported here, so that a missing package is what this stage has to say.
        outcome: Outcome = pkgutil.resolve_name(f"gpu_checks.{function}")(context)
    except Skipped as skipped:
        return {"status": SKIPPED, "reason": str(skipped)}
    except Failed as failed:
        return failure(str(failed), failed.to_do) | {"figures": failed.figures}
    except Exception as error:  # whatever it is, it is what this stage has to say
        traceback.print_exc()
        return failure(f"{type(error).__name__}: {error}".splitlines()[0][:300])
    return {"status": PASSED, "figure": outcome.figure, "figures": outcome.figures}


def failure(reason: str, to_do: str | None = None) -> Record:
    """The record of a stage that failed; a missing package has one fix, in whatever process it is missed."""
    if to_do is None and "ModuleNotFoundError" in reason:
        to_do = "install what requirements.txt lists (docs/installation.md)"
    return {"status": FAILED, "reason": reason} | ({} if to_do is None else {"to_do": to_do})


def main(argv: Sequence[str]) -> None:
    """Run one stage and write its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=[stage.name for stage in STAGES])
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(argv)
    record = run(Context(options.stage, options.device, options.toy, options.out))
    options.result.write_text(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1:])
