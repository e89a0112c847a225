"""Hidden states from an unforked vLLM.

A vLLM general plugin: installed with the package, asleep until an engine asks for it through vLLM's own pass-through
option, and then every finished completion carries the states its tokens were sampled from::

    llm = LLM(model, additional_config={"hidden_states": {"layers": [-1]}})
    out = llm.generate(prompts)
    out[0].outputs[0].hidden_states  # [num_tokens, num_layers, hidden]

This package imports vllm and torch, and nothing else.
"""

import logging

import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED = SpecifierSet(">=0.24,<0.34")


def is_supported(version: str) -> bool:
    """Whether the capture knows this version of vLLM; local and pre-release parts do not matter."""
    return Version(version).base_version in SUPPORTED


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it once or more in every process it starts.

    Outside the supported versions it only warns: the classes it would patch may not be there, and engines that never
    asked for hidden states must not suffer.
    """
    if is_supported(vllm.__version__):
        # Late: a version check must come before the import of what other versions may lack.
        from vllm_patches.install import install

        install()
    else:
        logging.getLogger(__name__).warning("vllm %s: hidden states need vllm%s", vllm.__version__, SUPPORTED)


__all__ = ["SUPPORTED", "is_supported", "register"]
