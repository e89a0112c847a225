"""Captures hidden states in an unmodified vLLM.

This package is a vLLM general plugin. It is inactive until an engine enables it through vLLM's own pass-through
option. Every finished completion then contains the states from which its tokens were sampled::

    llm = LLM(model, additional_config={"hidden_states": {"layers": [-1]}})
    out = llm.generate(prompts)
    out[0].outputs[0].hidden_states  # [num_tokens, num_layers, hidden]

The options are documented in :class:`vllm_patches.options.CaptureOptions`. An engine with
``additional_config={"sampling_streams": True}`` draws tokens from the random number stream that a request names
(:mod:`vllm_patches.sampler`). README.md lists what is supported. Outside the standard library, this package imports
only vllm, torch, numpy, packaging and safetensors.
"""

import functools


@functools.cache
def register() -> None:
    """Entry point in the group ``vllm.general_plugins``, which vLLM calls at least once in every process it starts.

    If this version of vLLM is unsupported or lacks something that the plugin relies on, engines that enable the plugin
    fail at startup with the reason; nothing else is patched.
    """
    # Import vLLM lazily, because the streams are also used without it.
    import vllm

    from vllm_patches.compat import SUPPORTED, is_supported, refuse

    if not is_supported(vllm.__version__):
        refuse(f"vLLM {vllm.__version__}: hidden states and sampling streams need vllm{SUPPORTED}")
        return
    try:
        # vLLM calls plugins while it starts, and other versions may lack names that these modules import.
        from vllm_patches import frontend, worker

        frontend.check()
    except (ImportError, RuntimeError) as error:
        refuse(f"vLLM {vllm.__version__}: no hidden states and no sampling streams: {error}")
    else:
        frontend.install()
        worker.install()


__all__ = ["register"]
