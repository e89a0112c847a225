"""Captures hidden states in an unmodified vLLM.

This package is a vLLM general plugin. An engine enables it through vLLM's pass-through option ``additional_config``.
Every finished completion then contains the hidden states from which its tokens were sampled::

    llm = LLM(model, additional_config={"hidden_states": {"layers": [-1]}})
    out = llm.generate(prompts)
    out[0].outputs[0].hidden_states  # [num_tokens, num_layers, hidden]

The options are documented in :class:`vllm_patches.options.CaptureOptions`. With
``additional_config={"sampling_streams": True}``, each request may specify the random number stream from which its
tokens are sampled (:mod:`vllm_patches.sampler`). README.md lists the supported features. This package depends only on
vllm, torch, numpy, packaging and safetensors.
"""

import functools


@functools.cache
def register() -> None:
    """Register the plugin. vLLM calls this entry point at least once in every process that it starts.

    The entry point's group is ``vllm.general_plugins``. If the vLLM version is unsupported or lacks a required
    attribute, engines that enable the plugin fail at startup with an explanation. Nothing else is patched in this case.
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
