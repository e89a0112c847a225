"""Stages that run the scripts that measure, and check what they wrote."""

import math

from bench_report import read_report

from gpu_checks.common import Context, Failed, Outcome, Record, run_command

SLOWEST_CAPTURE = 0.9
"""Smallest decoding speed with capture, relative to that without, on a GPU."""

ACCURACY = 1e-6
"""Largest relative error of an effective rank against the singular values in float64."""


def report(context: Context, script: str, *options: str) -> list[Record]:
    """Run a script; the rows that it wrote."""
    out = context.out / script
    run_command([f"benchmarks/{script}.py", "--out", str(out), *options], out.with_suffix(".log"))
    return read_report(out.with_suffix(".jsonl"))[1]


def capture_cost(context: Context) -> Outcome:
    """Tokens a second with the last layer's states against those without."""
    sizes = [
        "--shape",
        "tiny",
        "--sequences",
        "4",
        "--tokens",
        "16",
        "--rounds",
        "2",
        "--eager",
        "--kv-cache-mib",
        "64",
    ]
    rows = report(context, "bench_hidden_states", "--variants", "last", *(sizes if context.toy else ["--rounds", "5"]))
    figures = {row["variant"]: row for row in rows}
    for name, row in figures.items():
        if "error" in row:
            raise Failed(f"the engine {name!r} failed: {row['error']}", figures)
    off, last = figures["off"], figures["last"]
    # At toy size a generation takes milliseconds and its speed is noise.
    if not last["ratio"] > (0.0 if context.toy else SLOWEST_CAPTURE):
        raise Failed(f"capture leaves {last['ratio']:.0%} of the decoding speed", figures)
    if not 0 < last["peak_bytes"] <= last["bytes_by_formula"]:
        raise Failed(f"states took {last['peak_bytes']} bytes, {last['bytes_by_formula']} by the formula", figures)
    text = f"{off['tokens_per_s']:,.0f} tokens/s without, {last['tokens_per_s']:,.0f} with capture"
    return Outcome(f"{text} ({last['ratio']:.1%})", figures)


def spectra(context: Context) -> Outcome:
    """Effective ranks of every prefix: time by length, and the error where singular values can be had as well."""
    if context.toy:
        options = ["--rows", "64", "96", "--batch", "1", "--width", "16", "--strides", "8", "--repeats", "1"]
    else:
        options = ["--rows", "256", "1536", "4096", "8192", "--batch", "1", "8", "--width", "1536", "--strides", "40"]
        options += ["--limit", "30"]
    # Of the other methods the SVD alone is wanted, for the errors.
    rows = report(context, "bench_spectral", *options, "--methods", "nested", "svd", "--device", context.device)
    figures: Record = {"rows": rows}
    for row in rows:
        nested = row["methods"]["nested"]
        if nested.get("seconds") is None:
            why = nested.get("basis", "")
            raise Failed(f"{row['batch']} x {row['rows']} x {row['width']}: {nested['status']} {why}".strip(), figures)
    errors = [e for row in rows if (e := row["methods"]["nested"].get("max_relative_error")) is not None]
    if not errors or not max(errors) < ACCURACY:
        raise Failed(f"errors against the singular values: {errors}, not below {ACCURACY:g}", figures)
    largest = max(row["batch"] for row in rows)
    times = [f"{1e3 * row['methods']['nested']['seconds']:.0f} ms at {row['rows']}" for row in rows
             if row["batch"] == largest]  # fmt: skip
    return Outcome(f"{largest} responses: {', '.join(times)} tokens; error {max(errors):.0e}", figures)


def sampler(context: Context) -> Outcome:
    """Streams take as many operations for many rows as for few, and on a GPU less time than a seed per request."""
    sizes = ["--rows", "8", "--vocab", "1000", "--turns", "3"] if context.toy else []
    rows = report(context, "bench_sampler", *sizes, "--device", context.device)
    figures = {row["case"]: row for row in rows}
    for name, row in figures.items():
        operations = {found["streams"] for found in row["operations"].values()}
        if len(operations) != 1:
            raise Failed(f"{name}: the operations of streams depend on the number of rows: {operations}", figures)
        if not all(math.isfinite(value) and value > 0 for value in row["ratio"].values()):
            raise Failed(f"{name}: ratios {row['ratio']}", figures)
        # With few rows, at toy size and where rows are left out, a loop over them is no slower.
        many = row["rows"] == max(other["rows"] for other in rows) and not context.toy
        if context.on_gpu and many and not row["ratio"]["streams"] < row["ratio"]["seeded"]:
            raise Failed(f"{name}: streams take {row['ratio']['streams']:.2f} of unseeded, no less than seeds", figures)
    ratios = figures["training"]["ratio"]
    return Outcome(
        f"of the time of unseeded draws: streams {ratios['streams']:.2f}, seeds {ratios['seeded']:.2f}", figures
    )
