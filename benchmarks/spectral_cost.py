"""What the rank metrics of one response cost, by its length, against generating it.

python benchmarks/spectral_cost.py --out benchmarks/spectral_cost

Operations and bytes are computed by the formulas of ``verl.spectral.bounds``; seconds are measured on a CPU where the
operations are at most ``--limit``. Writes OUT.jsonl and OUT.md.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from bench_report import head, parser, provenance, table, timed, write_report

from verl.rank.dynamics import base_metrics, prefix_rows
from verl.spectral import SUM_S, SUM_S_LOG_S, SpectralOptions
from verl.spectral.bounds import block_rows, factor_operations, response_bytes
from verl.spectral.nodes import node_set

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)

SPECTRAL_RATE = 2e13
"""Float64 operations per second that a H100's matrix units are assumed to reach: 30% of 67e12."""
DECODING_RATE = 1e14
"""bfloat16 operations per second that decoding is assumed to reach: 10% of 989e12, with many sequences at once."""


class Model(NamedTuple):
    """Sizes of a model of the Qwen2.5 family."""

    name: str
    width: int
    parameters: float
    """Without the embedding, which is looked up; with the head."""
    layers: int


MODELS = (Model("1.5B", 1536, 1.54e9, 28), Model("7B", 3584, 7.07e9, 28), Model("14B", 5120, 14.0e9, 48))


def shifts() -> int:
    """Factorisations of one response without massive later tokens, for effective ranks."""
    return len(node_set((SUM_S, SUM_S_LOG_S), SpectralOptions.tolerance, SpectralOptions.condition).shifts)


def spectral_operations(rows: int, width: int) -> float:
    """Floating-point operations of the metrics of all prefixes of one response, one layer."""
    size = block_rows(rows, width)
    factors = shifts() * factor_operations(rows, width, size)
    if size == rows:
        return rows**2 * width + factors
    # The scatter before each block twice, tr S^2, and the Gram matrix of each block.
    return 2 * 2 * rows * width**2 + 2 * rows * width**2 + rows * size * width + factors


def decoding_operations(rows: int, model: Model) -> float:
    """Those of generating it: two per parameter and token, and attention over the tokens before."""
    return 2 * model.parameters * rows + 2 * model.layers * model.width * rows**2


def seconds(rows: int, width: int) -> float:
    """Measured time of effective rank with velocity's prefixes at stride 40, the faster of two runs."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, rows, width, generator=generator) * torch.arange(1, width + 1) ** -0.7
    lengths = torch.tensor([rows])
    prefixes = prefix_rows(lengths, 40)
    options = SpectralOptions("nested")
    runs = 2 if rows <= 2048 else 1
    return min(
        timed(lambda: base_metrics(hidden, lengths, prefixes, ["Effective Rank"], options))[0] for _ in range(runs)
    )


PAGE = """\
Threads: {threads}. No GPU has been used.

One layer, all prefixes, effective rank with its log, velocity and acceleration; the entropy takes one factorisation
more.
Operations and bytes are computed; seconds are measured on the CPU above, where they are given. "Of generating" is the
ratio of operations to those of decoding the same response with the model (2 per parameter and token, and attention),
though the first are float64 and the others bfloat16. "Of its time" assumes a H100 on which spectra reach
{spectral:.0e} float64 operations a second and decoding {decoding:.0e} in bfloat16. Both ratios hold for a whole step
of equally long responses, too.
"""


def page(metadata: dict[str, Any], records: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    rows = [
        [f"{r['model']}, {r['width']}", str(r["rows"]), str(r["block"]), f"{r['operations']:.2g}", f"{r['mib']:.0f}"]
        + [f"{r['seconds']:.3g}" if "seconds" in r else "–", f"{r['of_operations']:.1%}", f"{r['of_time']:.0%}"]
        for r in records
    ]
    columns = ["model, D", "tokens", "rows of a block", "operations", "MiB", "seconds on the CPU", "of generating"]
    text = PAGE.format(spectral=SPECTRAL_RATE, decoding=DECODING_RATE, **metadata)
    return (
        f"{head('Cost of the rank metrics of one response', metadata)}{text}\n{table([*columns, 'of its time'], rows)}"
    )


def record(model: Model, rows: int, limit: float) -> dict[str, Any]:
    """The figures of a response of ``rows`` tokens."""
    block, operations = block_rows(rows, model.width), spectral_operations(rows, model.width)
    share = operations / decoding_operations(rows, model)
    return {
        "model": model.name,
        "width": model.width,
        "rows": rows,
        "block": block,
        "operations": operations,
        "mib": response_bytes(rows, model.width, block) / 2**20,
        "seconds": seconds(rows, model.width) if operations <= limit else None,
        "of_operations": share,
        "of_time": share * DECODING_RATE / SPECTRAL_RATE,
    }


def main(argv: Sequence[str]) -> None:
    """Compute and measure."""
    command = parser(__doc__)
    command.add_argument("--limit", type=float, default=2e12, help="most operations that are measured; 0 for none")
    args = command.parse_args(argv)
    records = [record(model, rows, args.limit) for model in MODELS for rows in LENGTHS]
    metadata = provenance("spectral_cost.py", argv) | {"threads": torch.get_num_threads()}
    write_report(args.out, metadata, records, page)


if __name__ == "__main__":
    main(sys.argv[1:])
