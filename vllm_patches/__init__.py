"""Hidden states from an unforked vLLM.

A vLLM general plugin: installed with the package, asleep until an engine asks for it through vLLM's own pass-through
option, and then every finished completion carries the states its tokens were sampled from::

    llm = LLM(model, additional_config={"hidden_states": {"layers": [-1]}})
    out = llm.generate(prompts)
    out[0].outputs[0].hidden_states  # [num_tokens, num_layers, hidden]

This package imports vllm and torch, and nothing else.
"""


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it once or more in every process it starts."""
    from vllm_patches.install import install

    install()


__all__ = ["register"]
