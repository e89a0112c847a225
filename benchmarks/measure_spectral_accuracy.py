"""Errors of the rank metrics against a float64 SVD of every centred prefix, for easy and hard spectra.

python benchmarks/measure_spectral_accuracy.py --out benchmarks/spectral_accuracy.md

Writes one table: for each kind of spectrum the largest error over the prefixes of three shapes, of the nested method
and of eigenvalues of the float32 Gram matrix, as in the paper's release.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from bench_report import hardware, today
from torch import Tensor

from verl.rank.dynamics import acceleration, prefix_counts, prefix_rows, velocity
from verl.spectral import SUM_S, SUM_S_LOG_S, SpectralOptions, effective_rank, prefix_functionals, response_entropy
from verl.spectral.nodes import node_set
from verl.spectral.prefixes import DEFAULTS

SHAPES = [(256, 448), (256, 256), (384, 96)]
"""T below, equal to and above D."""

STRIDE = 8


def power_law(rows: int, width: int, exponent: float, floor: float) -> Tensor:
    """Orthonormal singular vectors drawn at random, singular values max(i^-exponent, floor)."""
    generator = torch.Generator().manual_seed(0)
    rank = min(rows, width)
    left, right = (
        torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64)).Q for size in (rows, width)
    )
    values = torch.arange(1, rank + 1, dtype=torch.float64) ** -exponent
    return (left * values.clamp(min=floor)) @ right.mT


def evenly_spread(rows: int, width: int, condition: float) -> Tensor:
    """Singular values evenly spread in the logarithm from 1 to 1 / condition."""
    hidden = power_law(rows, width, 0.0, 0.0)
    left, _, right = torch.linalg.svd(hidden, full_matrices=False)
    return (left * torch.logspace(0, -math.log10(condition), min(rows, width), dtype=torch.float64)) @ right


def hidden_like(rows: int, width: int, dtype: torch.dtype, massive: bool = False) -> Tensor:
    """Gaussian states whose columns fall off as j^-0.7, with a common offset; ``massive``: one column 1000 times it."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    hidden = hidden * torch.arange(1, width + 1) ** -0.7 + 3
    if massive:
        hidden[:, width // 2] *= 1e3 * (width // 2) ** 0.7
    return hidden.to(dtype)


SPECTRA: dict[str, Callable[[int, int], Tensor]] = {
    **{f"power law {a}, at least 1e-5": lambda t, d, a=a: power_law(t, d, a, 1e-5) for a in (0.5, 1, 2, 4)},
    **{f"power law {a}": lambda t, d, a=a: power_law(t, d, a, 0.0) for a in (3, 4)},
    **{f"condition {c:.0e}": lambda t, d, c=c: evenly_spread(t, d, c) for c in (1e3, 1e5, 1e6, 1e7, 1e9)},
    "massive activation, float32": lambda t, d: hidden_like(t, d, torch.float32, massive=True),
    "hidden-like, float32": lambda t, d: hidden_like(t, d, torch.float32),
    "hidden-like, bfloat16": lambda t, d: hidden_like(t, d, torch.bfloat16),
}


def exact(hidden: Tensor, prefixes: list[int]) -> tuple[Tensor, Tensor, float]:
    """Effective rank and response entropy ``[1, P]`` by float64 SVD, and the worst condition among the prefixes."""
    ranks, entropies, worst = [], [], 1.0
    for k in prefixes:
        rows = hidden[:k].double()
        values = torch.linalg.svdvals(rows - rows.mean(0))[: min(k - 1, hidden.shape[1])]
        ranks.append(effective_rank(values))
        entropies.append(response_entropy(values))
        worst = max(worst, float(values[0] / values[-1]))
    return torch.stack(ranks)[None], torch.stack(entropies)[None], worst


def float32_gram(hidden: Tensor, prefixes: list[int]) -> Tensor:
    """Effective rank ``[1, P]`` from eigenvalues of the float32 Gram matrix of each centred prefix."""
    ranks = []
    for k in prefixes:
        rows = hidden[:k].float()
        rows = rows - rows.mean(0)
        gram = rows @ rows.mT if k <= hidden.shape[1] else rows.mT @ rows
        ranks.append(effective_rank(torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().double()))
    return torch.stack(ranks)[None]


def errors(make: Callable[[int, int], Tensor]) -> list[float]:
    """Worst condition; nested: ER, log ER, entropy (relative), ERV, ERA (in units of ER); float32: ER, ERV."""
    worst = [0.0] * 8
    for rows, width in SHAPES:
        hidden, lengths = make(rows, width), torch.tensor([rows])
        columns, counts = prefix_rows(lengths, STRIDE), prefix_counts(lengths, STRIDE)
        prefixes = columns[0].tolist()
        rank, entropy, condition = exact(hidden, prefixes)
        names = ["effective_rank", "response_entropy"]
        nested = prefix_functionals(hidden[None], lengths, columns, names, SpectralOptions("nested"))
        coarse = float32_gram(hidden, prefixes)
        last = float(rank[0, -1])
        found = [
            condition,
            float((nested["effective_rank"] / rank - 1).abs().max()),
            float((nested["effective_rank"].log() / rank.log() - 1).abs().max()),
            float((nested["response_entropy"] / entropy - 1).abs().max()),
            *(
                float((change(nested["effective_rank"], counts) - change(rank, counts)).abs()) / last
                for change in (velocity, acceleration)
            ),
            float((coarse / rank - 1).abs().max()),
            float((velocity(coarse, counts) - velocity(rank, counts)).abs()) / last,
        ]
        worst = [max(pair) for pair in zip(worst, found, strict=True)]
    return worst


def float32_shift_errors(exponent: float) -> list[float]:
    """Error in log ER from a float32 factor at each of the eight largest shifts alone.

    For 512 x 896 states whose columns fall off as j^-exponent.
    """
    hidden = torch.randn(1, 512, 896, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hidden = hidden * torch.arange(1, 897) ** -exponent
    nodes = node_set((SUM_S, SUM_S_LOG_S), DEFAULTS.tolerance, DEFAULTS.condition)
    centred = hidden[0] - hidden[0].mean(0)
    gram, trace = centred @ centred.mT, centred.square().sum()
    total = torch.linalg.svdvals(centred).sum() / trace.sqrt()
    found = []
    for shift, weight in zip(nodes.shifts[:8], nodes.weights[1], strict=False):
        matrix = torch.eye(512, dtype=torch.float64) + gram / (trace * shift)
        coarse, fine = (
            2 * torch.linalg.cholesky(matrix.to(dtype)).diagonal().double().log().sum()
            for dtype in (torch.float32, torch.float64)
        )
        found.append(float((weight * (coarse - fine) / total).abs()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    args = parser.parse_args()
    lines = [
        "# Accuracy of the rank metrics",
        "",
        f"`python benchmarks/measure_spectral_accuracy.py`, {today()}, torch {torch.__version__}, {hardware()}.",
        "",
        f"Largest error over the prefixes of stride {STRIDE} of T x D = {', '.join(f'{t} x {d}' for t, d in SHAPES)},",
        "against a float64 SVD of each centred prefix. ER, log ER and entropy: relative; ERV and ERA: in units of ER.",
        "The condition is the worst of any prefix; it exceeds the whole matrix's, since a square prefix, k = D, is the",
        "worst conditioned. The paper's release uses the float32 Gram matrix.",
        "",
        "| spectrum | worst condition | ER | log ER | entropy | ERV | ERA | ER, float32 Gram | ERV, float32 Gram |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, make in SPECTRA.items():
        lines.append(f"| {name} | " + " | ".join(f"{value:.0e}" for value in errors(make)) + " |")
        print(lines[-1], flush=True)
    lines += [
        "",
        "Error in log ER from a float32 factor at a single shift, for the eight largest shifts (512 x 896):",
        "",
        *(
            f"- columns falling off as j^-{exponent}: " + ", ".join(f"{e:.0e}" for e in float32_shift_errors(exponent))
            for exponent in (0.7, 1.5)
        ),
    ]
    args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
