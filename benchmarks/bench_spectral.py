"""Measure the speed and the accuracy of "effective rank of every prefix", method by method.

python benchmarks/bench_spectral.py --out benchmarks/spectral

Writes OUT.jsonl (how it was made, then each shape's measurements) and OUT.md (one table per stride), after every shape.
A method estimated to take longer than ``--limit`` does not run and appears as "> limit". Estimates, per method, width
and stride, are linear in B from the largest B measured at the same T; for the first B of a new T they come from the
previous T, as T^3 (nested) or T^4 (the others: more prefixes, too). The smallest B and T always run. A shape whose
tensors exceed ``--memory-gib`` is "> memory".
Shapes: B responses, T rows, D hidden size, P prefixes per response.
"""

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_report import head, parser, provenance, table, take_turns, timed, write_report
from torch import Tensor

from verl.rank.dynamics import prefix_rows
from verl.spectral import SUM_S, SUM_S_LOG_S, SpectralOptions, prefix_functionals
from verl.spectral.cost import cheapest_method
from verl.spectral.nodes import node_set
from verl.spectral.responses import WORKSPACE_BYTES
from verl.utils.process import keep_freed_memory


def library(method: str, hidden: Tensor, lengths: Tensor, prefixes: Tensor) -> Tensor:
    """Effective ranks by one of the methods of verl.spectral."""
    return prefix_functionals(hidden, lengths, prefixes, ["effective_rank"], SpectralOptions(method))["effective_rank"]


def float32_loop(hidden: Tensor, lengths: Tensor, prefixes: Tensor) -> Tensor:
    """Effective ranks one prefix after the other from float32 Gram matrices, as the paper's release computes them."""
    result = hidden.new_ones(prefixes.shape)
    for response, row_counts in enumerate(prefixes.tolist()):
        for column, rows in enumerate(row_counts):
            result[response, column] = float32_effective_rank(hidden[response, :rows])
    return result


def float32_effective_rank(rows: Tensor) -> Tensor:
    """Effective rank of ``rows [k, D]`` from the eigenvalues of the smaller float32 Gram matrix, a scalar tensor."""
    centred = rows - rows.mean(0, keepdim=True)
    gram = centred @ centred.T if rows.shape[0] <= rows.shape[1] else centred.T @ centred
    singular_values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    return torch.special.entr(singular_values / singular_values.sum()).sum().exp()


class Method(NamedTuple):
    label: str
    description: str
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    """``hidden [B, T, D]``, ``lengths [B]``, ``prefixes [B, P]`` -> effective ranks ``[B, P]``."""
    growth: int = 4  # power of T by which its time is extrapolated


METHODS = {
    "nested": Method("nested", "verl.spectral, nested: float64", partial(library, "nested"), growth=3),
    "eigvalsh": Method("eigvalsh batched", "verl.spectral, eigh: float64, batched over B", partial(library, "eigh")),
    "float32_loop": Method("float32 loop", "eigvalsh of a float32 Gram matrix for each response, prefix", float32_loop),
    "svd": Method("float64 SVD", "verl.spectral, svd: the reference", partial(library, "svd")),
}


class Shape(NamedTuple):
    batch: int
    rows: int
    width: int


@dataclass
class Result:
    """One method on one shape and stride; ``status`` is ``measured``, ``> limit``, ``> memory`` or ``failed``.

    ``seconds`` is the fastest of ``runs``; ``cores``, the process's CPU time over wall time, and ``peak_bytes``, memory
    above what was allocated before (None: cannot be read), are those of the first. ``basis`` is where the estimate
    comes from, or the error of a failed method. ``values [B, P]`` and ``run`` are not written; the largest error of the
    values is against the float64 SVD, for B = 1.
    """

    status: str
    seconds: float | None = None
    runs: int = 0
    cores: float | None = None
    peak_bytes: int | None = None
    estimate_s: float | None = None
    basis: str | None = None
    max_relative_error: float | None = None
    values: Tensor | None = None
    run: Callable[[], Tensor] | None = None

    def __str__(self) -> str:
        return self.status if self.seconds is None else number(1e3 * self.seconds)


class Estimator:
    """Times measured or estimated so far, from which the next one is estimated."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], dict[int, tuple[int, float, str]]] = {}

    def add(self, name: str, shape: Shape, stride: int, seconds: float, source: str = "measured") -> None:
        """Remember a time, in the order of T and B."""
        times = self._known.setdefault((name, shape.width, stride), {})
        if source == "measured" or shape.rows not in times:
            times[shape.rows] = (shape.batch, seconds, source)

    def predict(self, name: str, shape: Shape, stride: int) -> tuple[float, str] | None:
        """Seconds of a measurement and where the estimate comes from; None if there is nothing to start from."""
        by_rows = self._known.get((name, shape.width, stride), {})
        rows = max((rows for rows in by_rows if rows <= shape.rows), default=None)
        if rows is None:
            return None
        batch, seconds, source = by_rows[rows]
        power = METHODS[name].growth
        seconds *= shape.batch / batch * (shape.rows / rows) ** power
        rule = "linear in B" if rows == shape.rows else f"T^{power} and linear in B"
        return seconds, f"{rule} from B={batch} T={rows} ({source})"


def make_hidden(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Float32 states ``[B, T, D]`` with columns falling as j^-0.7, an offset of 3 and one column 30 times larger, and
    full lengths ``[B]``; the same for the same shape."""
    generator = torch.Generator(device).manual_seed((shape.batch * 8191 + shape.rows) * 8191 + shape.width)
    hidden = torch.randn(shape, generator=generator, device=device)
    hidden.mul_(torch.arange(1, shape.width + 1, device=device) ** -0.7).add_(3.0)
    hidden[:, :, shape.width // 2].mul_(30.0)
    return hidden, torch.full((shape.batch,), shape.rows, device=device)


def shape_bytes(shape: Shape, device: torch.device) -> float:
    """The batch, and the larger of the library's workspace and one response's float64 copies and Gram matrices."""
    workspace = WORKSPACE_BYTES["cpu" if device.type == "cpu" else "cuda"]
    return 4 * shape.batch * shape.rows * shape.width + max(workspace, 24 * shape.rows * (shape.width + shape.rows))


def memory(device: torch.device, peak: bool) -> int | None:
    """Bytes allocated (on a CPU: resident) at the peak since the last call, or now, from where the next peak counts;
    None where a peak cannot be reset."""
    if device.type == "cuda":
        if not peak:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    try:
        if not peak:
            # The allocator keeps freed memory resident, which would hide a later peak of the same size.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split(maxsplit=1)[0])
    except (OSError, AttributeError):  # not Linux, or a C library without malloc_trim
        return None


def first_run(run: Callable[[], Tensor], device: torch.device) -> Result:
    """Time, memory and values of one run."""
    before, cpu = memory(device, peak=False), time.process_time()
    try:
        seconds, values = timed(run, device.type)
    except (RuntimeError, FloatingPointError) as error:  # out of memory, no convergence, a bad pivot: a result too
        return Result("failed", basis=str(error).partition("\n")[0])
    cores, after = (time.process_time() - cpu) / seconds, memory(device, peak=True)
    peak = None if before is None or after is None else after - before
    return Result("measured", seconds, 1, cores, peak, values=values, run=run)


def repeat(results: Mapping[str, Result], device: torch.device, repeats: int) -> None:
    """Further runs, in turns, of the methods whose first took at most 1 s; that was their warm-up."""
    turns = {
        name: partial(timed, result.run, device.type)
        for name, result in results.items()
        if result.run is not None and result.seconds is not None and result.seconds <= 1
    }
    rounds = list(take_turns(turns, repeats))
    for name in turns:
        results[name].seconds, results[name].runs = min(turn[name][0] for turn in rounds), repeats


def settle(device: torch.device) -> None:
    """Wait, some 5 s at most, until a CPU's threads run side by side: two on one core lose a time slice at every
    barrier, which makes small products 100 times slower."""
    matrix = torch.eye(512, dtype=torch.float64)
    for _ in range(25 if device.type == "cpu" else 0):
        start, cpu = time.perf_counter(), time.process_time()
        torch.linalg.matrix_power(matrix, 1024)
        if time.process_time() - cpu > 0.9 * torch.get_num_threads() * (time.perf_counter() - start):
            return
        time.sleep(0.2)


class Bench:
    """One run over all shapes: its settings, its estimates and the records made so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        name = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        self.device, self.limit_s, self.repeats = torch.device(name), args.limit, args.repeats
        self.methods = args.methods
        self.memory_gib = {"cpu": 8.0, "cuda": 60.0}[name] if args.memory_gib is None else args.memory_gib
        self.estimator = Estimator()
        self.records: list[dict[str, Any]] = []
        hidden, lengths = make_hidden(Shape(2, 24, 16), self.device)
        for method in METHODS.values():  # what is set up once: libraries, handles, the fit's nodes
            method.run(hidden, lengths, prefix_rows(lengths, 4))
        settle(self.device)
        size = {"cpu": 2048, "cuda": 8192}[name]
        matrix = torch.ones(size, size, dtype=torch.float64, device=self.device)
        self.operations_per_s = 2 * size**3 / min(timed(lambda: matrix @ matrix, name)[0] for _ in range(4))
        nodes = node_set((SUM_S, SUM_S_LOG_S), SpectralOptions.tolerance, SpectralOptions.condition)
        self.nodes = len(nodes.shifts)

    def shape(self, shape: Shape, strides: Sequence[int]) -> None:
        """All methods and strides on the same tensors, which are made when the first of them runs."""
        settle(self.device)
        hidden = cache(partial(make_hidden, shape, self.device))
        fits = shape_bytes(shape, self.device) <= self.memory_gib * 2**30
        for stride in strides:
            results = {
                name: self.method(name, shape, stride, hidden) if fits else Result("> memory") for name in self.methods
            }
            repeat(results, self.device, self.repeats)
            for name, result in results.items():
                if result.seconds is not None:
                    self.estimator.add(name, shape, stride, result.seconds)
                where = f"B={shape.batch} T={shape.rows} D={shape.width} stride={stride} {METHODS[name].label}"
                print(f"{where}, ms: {result}", file=sys.stderr, flush=True)
            exact = results["svd"].values if shape.batch == 1 and "svd" in results else None
            for result in results.values():
                if exact is not None and result.values is not None:
                    result.max_relative_error = float((result.values / exact - 1).abs().max())
            self.records.append(self.record(shape, stride, results))

    def method(self, name: str, shape: Shape, stride: int, hidden: Callable[[], tuple[Tensor, Tensor]]) -> Result:
        """The first run of one method, unless the estimate is over the limit."""
        estimate, basis = self.estimator.predict(name, shape, stride) or (None, None)
        if estimate is not None and estimate > self.limit_s:
            self.estimator.add(name, shape, stride, estimate, "estimated")
            return Result("> limit", estimate_s=estimate, basis=basis)
        states, lengths = hidden()
        result = first_run(partial(METHODS[name].run, states, lengths, prefix_rows(lengths, stride)), self.device)
        result.estimate_s, result.basis = estimate, result.basis or basis
        return result

    def record(self, shape: Shape, stride: int, results: dict[str, Result]) -> dict[str, Any]:
        """Plain numbers of one shape and stride; ratios are None where a time is missing."""
        operations = self.nodes * shape.rows**3 / 3 + 2 * shape.rows**2 * shape.width
        floor = shape.batch * operations / self.operations_per_s
        times = {name: result.seconds for name, result in results.items()}
        nested, eigvalsh, loop = (times.get(name) for name in ("nested", "eigvalsh", "float32_loop"))
        lengths = torch.full((shape.batch,), shape.rows, device=self.device)
        return {
            **shape._asdict(),
            "stride": stride,
            "prefixes": (shape.rows - 1) // stride,
            "methods": {
                name: {k: v for k, v in vars(r).items() if k not in ("values", "run")} for name, r in results.items()
            },
            "loop_over_nested": loop / nested if loop and nested else None,
            "eigvalsh_over_nested": eigvalsh / nested if eigvalsh and nested else None,
            "floor_s": floor,
            "nested_over_floor": nested / floor if nested else None,
            "auto": cheapest_method(
                lengths, prefix_rows(lengths, stride), shape.width, self.nodes, device=self.device.type
            ),
        }

    def metadata(self, argv: Sequence[str]) -> dict[str, Any]:
        """Where, when and how the run was made."""
        return provenance("bench_spectral.py", argv, self.device.type) | {
            "threads": torch.get_num_threads(),
            **{name: getattr(self, name) for name in ("limit_s", "memory_gib", "repeats", "nodes", "operations_per_s")},
        }


def number(value: float | None) -> str:
    """Three digits; a dash for None."""
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


PAGE = """\
Threads: {threads}. Milliseconds for the effective ranks of all prefixes (j * stride + 1 rows, j = 1, 2, ...) of all B
responses of T rows and width D, on the same tensors: the fastest of {repeats} runs after a warm-up, in turns with the
other methods, or the only run where one takes over 1 s. The C library keeps freed memory, as in a training's workers.
Ratios above 1 say that nested is faster. "x floor" is nested's time divided by that of {nodes} T^3 / 3 + 2 T^2 D
float64 operations a response at {operations_per_s:.3g} a second, the rate of matrix products measured in this run;
nested takes fewer where T is well above D, as it works in blocks, and from 192 rows, whose first columns all
factorisations share. The peak is memory above what was allocated before; errors are the largest over prefixes, relative
to the float64 SVD where that ran with B = 1.

`> limit` was not run: estimated above {limit_s:g} s, from the largest B measured at the same T (linear in B), or from
the previous T (T^3 for nested; T^4 for the others).
`> memory` was not run: tensors above {memory_gib:g} GiB. `failed` raised an error. The data file has each estimate.
"""


def page(metadata: dict[str, Any], records: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown, one table per stride."""
    columns = ["B", "T", "D", *(f"{method.label} ms" for method in METHODS.values()), "loop / nested"]
    columns += ["eigvalsh / nested", "x floor", "auto takes", "peak MiB of nested", "error nested / error loop"]
    text = head("Effective rank of every prefix", metadata) + PAGE.format(**metadata) + "\n"
    text += "".join(f"- {method.label}: {method.description}\n" for method in METHODS.values())
    for stride in dict.fromkeys(entry["stride"] for entry in records):
        rows = [page_row(entry) for entry in records if entry["stride"] == stride]
        text += f"\n## Stride {stride}\n\n{table(columns, rows)}"
    return text


def page_row(entry: dict[str, Any]) -> list[str]:
    """One record as a row of its table."""
    methods = {name: Result(**entry["methods"].get(name, {"status": ""})) for name in METHODS}
    peak, *errors = methods["nested"].peak_bytes, *(methods[n].max_relative_error for n in ("nested", "float32_loop"))
    cells = [str(entry[name]) for name in Shape._fields] + [str(result) for result in methods.values()]
    cells += [number(entry.get(name)) for name in ("loop_over_nested", "eigvalsh_over_nested", "nested_over_floor")]
    cells += [entry["auto"]]
    return cells + [number(peak and peak / 2**20), " / ".join("–" if e is None else f"{e:.1e}" for e in errors)]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ends the program if the options contradict each other."""
    command = parser(__doc__)
    command.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 192], help="responses B")
    command.add_argument("--rows", type=int, nargs="+", default=[128, 512, 1536, 4096], help="rows T of a response")
    command.add_argument("--width", type=int, nargs="+", default=[64, 896, 3584], help="hidden sizes D")
    command.add_argument("--strides", type=int, nargs="+", default=[1, 8, 40], help="rows from one prefix to the next")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument("--limit", type=float, default=5.0, help="longest estimated time of one run, seconds")
    command.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="which run")
    command.add_argument("--memory-gib", type=float, help="bound on a shape's tensors; default 8 on cpu, 60 on cuda")
    command.add_argument("--repeats", type=int, default=3, help="runs, of which the fastest counts")
    args = command.parse_args(argv)
    if min(*args.batch, *args.width, *args.strides, args.repeats) < 1 or max(args.strides) >= min(args.rows):
        command.error("--batch, --width, --strides, --repeats: at least 1; --strides: less than the smallest of --rows")
    return args


def main(argv: Sequence[str]) -> None:
    """Measure every shape, in the order that estimates need."""
    args = parse(argv)
    keep_freed_memory()  # as the workers of a training do
    bench = Bench(args)
    metadata = bench.metadata(argv)
    for shape in product(sorted(set(args.width)), sorted(set(args.rows)), sorted(set(args.batch))):
        bench.shape(Shape(*reversed(shape)), sorted(set(args.strides)))
        write_report(args.out, metadata, bench.records, page)


if __name__ == "__main__":
    main(sys.argv[1:])
