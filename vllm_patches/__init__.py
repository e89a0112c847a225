"""Hidden states from an unforked vLLM.

A vLLM general plugin, installed with the package. It does nothing until an engine asks for it through vLLM's own
pass-through option. Then every finished completion carries the states that its tokens were sampled from::

    llm = LLM(model, additional_config={"hidden_states": {"layers": [-1]}})
    out = llm.generate(prompts)
    out[0].outputs[0].hidden_states  # [num_tokens, num_layers, hidden]

The options are those of :class:`vllm_patches.options.CaptureOptions`. An engine with
``additional_config={"sampling_streams": True}`` draws the tokens of requests that name a stream of random numbers from
it (:mod:`vllm_patches.sampler`). README.md says what is supported. This package imports vllm, torch, numpy, packaging
and safetensors, and nothing else.
"""

import functools


@functools.cache
def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it at least once in every process that it starts.

    If this vLLM is of an unsupported version or lacks what the plugin relies on, engines that ask for what it does fail
    at start with the reason; nothing else is patched.
    """
    # Imported late: the streams are for engines without vLLM, too.
    import vllm

    from vllm_patches.compat import SUPPORTED, is_supported, refuse

    if not is_supported(vllm.__version__):
        refuse(f"vLLM {vllm.__version__}: hidden states and sampling streams need vllm{SUPPORTED}")
        return
    try:
        # vLLM calls plugins while it starts, and other versions may lack what these modules import.
        from vllm_patches import frontend, worker

        frontend.check()
    except (ImportError, RuntimeError) as error:
        refuse(f"vLLM {vllm.__version__}: no hidden states and no sampling streams: {error}")
    else:
        frontend.install()
        worker.install()


__all__ = ["register"]
