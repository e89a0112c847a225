"""Write the tables of docs/from_verl.md: what becomes of each of veRL's options, by the translator's own tables.

python scripts/make_from_verl.py [--check]

The rest of the page is written by hand. With --check nothing is written, and exit code 1 means that it is stale.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.cli.verl_earlier import EARLIER_OPTIONS
from verl.cli.verl_learning import ALGORITHM_OPTIONS, CRITIC_OPTIONS, REWARD_OPTIONS
from verl.cli.verl_options import Option
from verl.cli.verl_policy import ACTOR_OPTIONS, MODEL_OPTIONS, REF_OPTIONS
from verl.cli.verl_rollout import ROLLOUT_OPTIONS
from verl.cli.verl_run import DATA_OPTIONS, SYSTEM_OPTIONS, TRAINER_OPTIONS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from_verl.md"
BEGIN, END = "<!-- Written by scripts/make_from_verl.py: begin -->\n", "<!-- end -->\n"

SECTIONS = {
    "data": DATA_OPTIONS,
    "actor_rollout_ref.model": MODEL_OPTIONS,
    "actor_rollout_ref.actor": ACTOR_OPTIONS,
    "actor_rollout_ref.rollout": ROLLOUT_OPTIONS,
    "actor_rollout_ref.ref": REF_OPTIONS,
    "algorithm": ALGORITHM_OPTIONS,
    "critic": CRITIC_OPTIONS,
    "Rewards": REWARD_OPTIONS,
    "trainer": TRAINER_OPTIONS,
    "The system": SYSTEM_OPTIONS,
    "Earlier names": EARLIER_OPTIONS,
}
KINDS = {"translated": "", "accepted": "No effect: ", "refused": "Refused: "}


def row(key: str, option: Option) -> str:
    """One line of a table."""
    prefix = "" if option.meaning.startswith("only ") else KINDS[option.kind]
    return f"| `{key}` | {prefix}{option.meaning} |"


def tables() -> str:
    """All tables."""
    parts = []
    for title, options in SECTIONS.items():
        heading = f"`{title}`" if title[0].islower() else title
        rows = "\n".join(row(key, option) for key, option in options.items())
        parts.append(f"### {heading}\n\n| veRL's option | Here |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or check them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is stale")
    check = parser.parse_args(argv).check
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    current = f"{before}{BEGIN}\n{tables()}\n{END}{after}"
    if not check:
        PAGE.write_text(current)
    elif text != current:
        print("docs/from_verl.md is stale; run: python scripts/make_from_verl.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
