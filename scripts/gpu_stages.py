"""Run one stage of scripts/check_gpu.py, in a process of its own.

python scripts/gpu_stages.py STAGE --device cuda --out FOLDER --result FILE [--toy]

A stage returns what it found, or raises ``Failed`` or ``Skipped``. The numbers come from what users run: the training
command, the tests marked ``gpu``, and the scripts that measure.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from gpu_checks import machine, measuring, scale, testing, training
from gpu_checks.common import FAILED, PASSED, SKIPPED, Context, Failed, Outcome, Record, Skipped

FUNCTIONS: dict[str, Callable[[Context], Outcome]] = {
    "versions": machine.versions,
    **{name: partial(testing.tests, name) for name in testing.TESTS},
    "train": training.train,
    "resume": training.resume,
    "step-packed": partial(scale.whole_steps, packed=True),
    "step-padded": partial(scale.whole_steps, packed=False),
    "tensor-parallel": scale.tensor_parallel,
    "sharding": scale.sharding,
    "capture-cost": measuring.capture_cost,
    "spectra": measuring.spectra,
    "sampler": measuring.sampler,
}


def main(argv: Sequence[str]) -> int:
    """Run one stage and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(argv)
    found: Record
    try:
        outcome = FUNCTIONS[options.stage](Context(options.device, options.toy, options.out))
        found = {"status": PASSED, "figure": outcome.figure, "figures": outcome.figures}
    except Skipped as skipped:
        found = {"status": SKIPPED, "reason": str(skipped)}
    except Failed as failed:
        found = {"status": FAILED, "reason": str(failed), "figures": failed.figures}
    except Exception as error:  # whatever it is, it is what this stage has to say
        traceback.print_exc()
        found = {"status": FAILED, "reason": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    options.result.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
