"""Memory of the output head in chunks; that its results are equal is in test_forward.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from verl.models.output_head import ScoringTargets, chunk_output_head, logprobs_and_entropy

NUM_TOKENS, VOCABULARY, CHUNK = 64, 500, 8


class LargestResult(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returns, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def largest_tensor(chunk: int) -> int:
    """Elements of the largest tensor while a head of 500 words learns from 64 tokens."""
    torch.manual_seed(0)
    # Narrow, so that nothing but logits is large: the head itself has 500 x 8 weights.
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).eval()
    ids = torch.randint(VOCABULARY, (1, NUM_TOKENS))
    targets = ScoringTargets(torch.arange(NUM_TOKENS), ids[0].roll(-1), 0.5, True)
    with LargestResult() as largest:
        if chunk:
            chunk_output_head(model, chunk)
            logprobs, entropy = model(ids, use_cache=False, targets=targets)
        else:
            logprobs, entropy = logprobs_and_entropy(model(ids, use_cache=False).logits[0], *targets[1:])
        (logprobs + entropy).sum().backward()
    return largest.elements


def test_no_tensor_holds_the_logits_of_more_than_a_chunk():
    assert largest_tensor(0) == NUM_TOKENS * VOCABULARY
    # The head's weights and their gradient have the size of a chunk of 8 here.
    assert largest_tensor(CHUNK) == largest_tensor(7) == CHUNK * VOCABULARY
