"""Measure float32 products on a CPU: oneDNN against the library that torch's matrix product calls.

python benchmarks/bench_products.py --out benchmarks/products

Each product of a linear layer [N, K] in training, for M tokens: forward, the gradient of the states and that of the
weights. Rates are the best of several calls on one thread, in 10^9 operations a second, so that what else runs on the
machine matters little; the ratio is that of the two rates. Writes OUT.jsonl (how it was made, then each product) and
OUT.md.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_report import provenance, write_report
from torch import Tensor

from verl.models.onednn import product, weight_gradient

LAYERS = {"up": (128, 384), "down": (384, 128), "1.5B up": (1536, 8960)}
"""Name -> K and N: the tiny model's, and one of a real model."""
TOKENS = (16, 64, 256, 3072)
CALLS, SECONDS = 5, 0.5

Product = Callable[[], Tensor]


def products(tokens: int, inputs: int, outputs: int) -> Iterator[tuple[str, Product, Product]]:
    """Name, torch's product and oneDNN's."""
    states, weight, gradient = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)
    yield "forward", lambda: states @ weight.t(), lambda: product(states, weight)
    yield "states' gradient", lambda: gradient @ weight, lambda: product(gradient, weight.t())
    yield "weights' gradient", lambda: gradient.t() @ states, lambda: weight_gradient(gradient, states)


def rate(compute: Product, operations: int) -> float:
    """The best rate, in 10^9 operations a second."""
    compute()
    fastest, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        started = time.perf_counter()
        for _ in range(CALLS):
            compute()
        fastest = min(fastest, (time.perf_counter() - started) / CALLS)
    return operations / fastest / 1e9


def measure() -> Iterator[dict[str, Any]]:
    """A row for each product."""
    for layer, (inputs, outputs) in LAYERS.items():
        for tokens in TOKENS:
            for name, by_torch, by_onednn in products(tokens, inputs, outputs):
                operations = 2 * tokens * inputs * outputs
                rates = {"torch": rate(by_torch, operations), "onednn": rate(by_onednn, operations)}
                yield {"layer": layer, "tokens": tokens, "product": name, **rates}


def page(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "# Float32 products on a CPU",
        "",
        f"{facts['hardware']} (one used), torch {facts['torch']}, {facts['date']}. In 10^9 operations a second;",
        "torch's own matrix product calls MKL here.",
        "",
        "Regenerate with",
        "",
        f"    {facts['command']}",
        "",
        "| layer | tokens | product | torch | oneDNN | ratio |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        ratio = row["onednn"] / row["torch"]
        lines.append(
            f"| {row['layer']} | {row['tokens']} | {row['product']} | {row['torch']:.0f} | {row['onednn']:.0f} "
            f"| {ratio:.1f} |"
        )
    return "\n".join([*lines, ""])


def main(argv: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="path of OUT.jsonl and OUT.md without suffix")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    facts, rows = provenance("bench_products.py", argv), list(measure())
    write_report(options.out, facts, rows, page)
    print(page(facts, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
