"""Hidden states from an unforked vLLM.

A vLLM general plugin: installed with the package, asleep until an engine asks for it through vLLM's own pass-through
option, and then every finished completion carries the states its tokens were sampled from::

    llm = LLM(model, additional_config={"hidden_states": {"layers": [-1]}})
    out = llm.generate(prompts)
    out[0].outputs[0].hidden_states  # [num_tokens, num_layers, hidden]

Options are those of :class:`vllm_patches.options.CaptureOptions`; README.md tells what is supported. This package
imports vllm, torch, numpy, packaging and safetensors, and nothing else.
"""

import functools

import vllm

from vllm_patches.compat import SUPPORTED, is_supported, refuse


@functools.cache
def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it once or more in every process it starts.

    With a vLLM that is unknown, or lacks what is relied on, nothing is patched but the start of engines that ask for
    hidden states, which fails with the reason.
    """
    if not is_supported(vllm.__version__):
        refuse(f"vLLM {vllm.__version__}: hidden states can be captured with vllm{SUPPORTED}")
        return
    try:
        # Late: vLLM calls plugins while it starts, and what other versions lack must not be touched.
        from vllm_patches import frontend, worker

        frontend.check()
    except (ImportError, RuntimeError) as error:
        refuse(f"vLLM {vllm.__version__}: hidden states cannot be captured: {error}")
    else:
        frontend.install()
        worker.install()


__all__ = ["SUPPORTED", "is_supported", "register"]
