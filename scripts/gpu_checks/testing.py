"""Stages that run tests of tests/: those for a GPU, or at toy size on a CPU what comes next to them."""

import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

from gpu_checks.common import Context, Failed, Outcome, Record, Skipped, run_command

GPU_TESTS = "tests/vllm_patches/test_gpu.py"
ENGINES = "tests/vllm_patches/test_engines.py"
SAMPLER = "tests/vllm_patches/test_sampler.py"
ROLLOUTS = "tests/rollout/test_rollouts.py"
COMPILED = f"{GPU_TESTS}::test_compiled_engines_with_cuda_graphs"
ARCHITECTURES = ("qwen2", "llama", "gemma2", "qwen3_moe")
OFFLOAD = "tests/models/test_offload.py"
ATTENTION = "tests/models/test_attention.py"
ACCURACY = "tests/spectral/test_accuracy.py"

TESTS: dict[str, tuple[list[str], list[str]]] = {
    "sleep": ([f"{GPU_TESTS}::test_sleep_and_wake"], [f"{ROLLOUTS}::test_an_engine_wakes_before_it_samples"]),
    "sync": (
        [f"{ROLLOUTS}::test_generating_and_learning_take_turns_on_a_gpu"],
        [f"{ROLLOUTS}::test_an_engine_follows_the_policy"],
    ),
    "offload": (
        [f"{OFFLOAD}::test_memory_of_a_gpu_is_free_between_phases"],
        [f"{OFFLOAD}::test_tensors_of_several_pieces_come_back_as_they_were"],
    ),
    "attention": (
        [f"{ATTENTION}::test_kernels_agree_with_one_row_after_the_other"],
        [f"{ATTENTION}::test_tokens_see_their_own_row_up_to_themselves"],
    ),
    "capture": (
        [f"{COMPILED}[{name}-0]" for name in ARCHITECTURES],
        [f"{ENGINES}::test_every_architecture[{name}]" for name in ARCHITECTURES],
    ),
    "capture-second-runner": ([f"{COMPILED}[{name}-1]" for name in ARCHITECTURES], []),
    "streams": (
        [f"{GPU_TESTS}::test_draws_from_streams_do_not_depend_on_the_batch"],
        [f"{SAMPLER}::test_draws_do_not_depend_on_chunks_preemptions_and_caches"],
    ),
    "spectra-agree": (
        [f"{ACCURACY}::test_a_gpu_gives_what_a_cpu_gives"],
        [f"{ACCURACY}::test_velocity_and_acceleration"],
    ),
}
"""Stages that are tests: those for a GPU, and at toy size on a CPU what comes next to them there."""

MAY_SKIP = {"attention": "flash"}
"""Tests that may skip on a GPU: those whose name holds this word need a package that is optional."""


def tests(context: Context) -> Outcome:
    """Run the tests of a stage; all must pass."""
    chosen = TESTS[context.stage][0 if context.on_gpu else 1]
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
        run_command(["-m", "pytest", *chosen, *options], context.out / "pytest.log")
    except Failed as failed:
        failure = failed
    if not report.is_file():
        raise failure or Failed("pytest wrote no report")
    found = counts(report)
    if found["failed"] or failure:
        first = f"{found['failed'][0]}: {found['messages'][0]}" if found["failed"] else str(failure)
        raise Failed(f"{len(found['failed'])} of {found['tests']} tests failed; {first}", found)
    skipped = [test for test in found["skipped"] if MAY_SKIP.get(context.stage, "\0") not in test]
    if skipped and context.on_gpu:
        raise Failed(f"skipped, though there is a GPU: {skipped[0]}", found)
    if not found["passed"]:
        raise Failed("no test ran", found)
    more = f", {len(found['skipped'])} skipped" if found["skipped"] else ""
    return Outcome(f"{found['passed']} tests passed{more}", found)


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
