"""Attention over packed sequences, which are concatenated without padding. Each sequence attends only to itself.

``transformers`` looks up attention and mask functions by the name in the model's config. Importing this module
registers packed versions under :func:`packed_name`. The packed versions read sequence boundaries from the keyword
arguments that ``transformers`` uses for FlashAttention (``cu_seq_lens_q``, ``max_length_q``, ...). The additional
argument ``sequence_group`` is the process group across which the tokens are split. Without these arguments, the
functions process padded sequences like the original functions.

Shapes: B sequences, H query heads, K key and value heads, T tokens of a packed batch, D head dimension.
"""

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, flash_attention_mask, sdpa_mask
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.models.packing import NO_MASK, Rows, SharedPrompts, causal_mask, take_tokens
from verl.models.sequence_parallel import gather_heads, split_heads


def fused_mask(*, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Return the mask that ``transformers`` builds for ``sdpa``, even if there is no padding.

    ``transformers`` skips the mask if there is no padding, but this check makes the host wait for the GPU.
    """
    if attention_mask is not None and attention_mask.is_cuda:
        kwargs["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(attention_mask=attention_mask, **kwargs)
    return mask


MASK_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "eager": eager_mask,
    "sdpa": fused_mask,
    "flash_attention_2": flash_attention_mask,
    "flash_attention_3": flash_attention_mask,
}
"""Maps attention implementations that support packed sequences to their mask functions for padded sequences."""

UNSUPPORTED = ("s_aux", "position_bias", "indices", "block_indices")
"""Attention arguments that affect the result and are not supported for packed sequences."""

WINDOWS_IN_MASKS = ("PhimoeAttention", "Qwen2MoeAttention")
"""Attention classes that apply their sliding window only through the mask. Packed sequences have no mask."""

FLASH_HEAD_WIDTH = 256
"""Largest head dimension that the variable-length kernel supports."""


def attention_name(config: ModelConfig) -> str:
    """Return the name under which the attention implementation in ``config`` is registered in ``transformers``."""
    return packed_name(config.attn_implementation) if config.use_remove_padding else config.attn_implementation


def packed_name(implementation: str) -> str:
    """Return the name under which the packed version of ``implementation`` is registered.

    The name must not contain "sdpa" or "flash", because ``transformers`` treats such names specially.
    """
    return {"sdpa": "packed_fused", "eager": "packed_eager"}.get(implementation, f"packed_fa{implementation[-1]}")


class Options(NamedTuple):
    """Options for computing attention."""

    implementation: str
    """Attention implementation of ``transformers`` to use."""
    scaling: float | None
    """Scale factor for the attention scores, or None for 1 / sqrt(D)."""
    window: int | None
    """Sliding window in tokens, including the query itself, or None for full attention."""
    softcap: float | None
    """Soft cap on the attention scores, ``softcap * tanh(scores / softcap)``, or None for no cap."""

    @property
    def flash(self) -> bool:
        """Whether to use the FlashAttention package."""
        return self.implementation.startswith("flash")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    implementation: str,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sequence_group: ProcessGroup | None = None,
    shared_prompts: SharedPrompts | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention with the ``transformers`` interface. For the score options, see :class:`Options`.

    Raises ``ConfigError`` if the model's attention uses an unsupported feature.

    Args:
        query: [B, H, T, D]. For packed sequences, B is 1. With ``sequence_group``, T counts this worker's tokens.
        key, value: [B, K, T, D].
        attention_mask: mask for padded sequences in the implementation's format. For packed sequences, None or a dummy
            mask of shape ``NO_MASK``.
        sliding_window: window in tokens, or None to use :func:`window_in_mask`.
        cu_seq_lens_q: [number of sequences + 1] int32, cumulative sequence lengths, or None for padded sequences.
        max_length_q: length of the longest sequence.
        sequence_group: workers that share the tokens, or None if this worker has all of them.
        shared_prompts: layout of prompts shared between sequences, or None if each sequence has its own prompt.

    Returns:
        The output [B, T, H, D], which is contiguous, and None instead of attention weights.
    """
    assert dropout == 0.0, "models run without dropout"
    window = window_in_mask(module) if sliding_window is None else sliding_window
    options = Options(implementation, scaling, window, softcap)
    if attention_mask is not None and attention_mask.shape == NO_MASK:
        attention_mask = None
    masked = attention_mask is not None and (cu_seq_lens_q is not None or shared_prompts is not None)
    _check_supported(module, options, masked, others)
    if shared_prompts is not None:
        output = _sharing_prompts(query, key, value, shared_prompts, options)
    elif cu_seq_lens_q is None:
        output = _padded(module, query, key, value, attention_mask, options)
    else:
        assert max_length_q is not None, "comes with cu_seq_lens_q"
        if sequence_group is not None:
            query, key, value = (split_heads(states[0], sequence_group)[None] for states in (query, key, value))
        rows = Rows(cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        output = _packed(query, key, value, rows, options)
        if sequence_group is not None:
            output = gather_heads(output[0].transpose(0, 1), sequence_group).transpose(0, 1)[None]
    return output.contiguous(), None


def _check_supported(module: nn.Module, options: Options, masked: bool, others: dict[str, Any]) -> None:
    """Raise ``ConfigError`` for unsupported arguments. ``masked`` indicates that packed sequences have a mask."""
    unsupported = [name for name in UNSUPPORTED if others.get(name) is not None]
    if options.softcap is not None and options.implementation == "sdpa":
        unsupported.append("softcap")
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        unsupported.append("is_causal=False")
    if masked:
        unsupported.append("a mask of its own")
    if unsupported:
        names = ", ".join(unsupported)
        raise ConfigError(
            f"model.attn_implementation={options.implementation!r}: packed rows do not support {names}, "
            f"which {type(module).__name__} uses; set model.use_remove_padding=false, or, for softcap only, "
            "model.attn_implementation=eager or flash_attention_2"
        )


def window_in_mask(module: nn.Module) -> int | None:
    """Return the sliding window of a module in ``WINDOWS_IN_MASKS``, or None for other modules."""
    if type(module).__name__ not in WINDOWS_IN_MASKS:
        return None
    config: Any = module.config
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or kinds[cast(int, module.layer_idx)] == "sliding_attention"
    return cast(int | None, config.sliding_window) if slides else None


def _padded(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options
) -> Tensor:
    if options.flash:
        return _flash(query, key, value, mask, None, options)
    if options.implementation == "sdpa":
        return sdpa_attention_forward(module, query, key, value, mask, scaling=options.scaling)[0]
    return _eager(query, key, value, mask, options).transpose(1, 2)


def _packed(query: Tensor, key: Tensor, value: Tensor, rows: Rows, options: Options) -> Tensor:
    """Compute attention over packed sequences, and return outputs of shape [1, T, H, D].

    Kernels process all sequences at once and align the last query of each sequence with its last key. Without a kernel,
    sequences are processed one at a time and must have as many keys as queries.
    """
    if options.flash:
        return _flash(query, key, value, None, rows, options)
    if _has_varlen_kernel(query, value, options):
        return _varlen(query, key, value, rows, options)
    outputs = []
    bounds = rows.queries.tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        length, window = end - start, options.window
        mask = None
        if window is not None and length > window:
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        q, k, v = (states[:, :, start:end] for states in (query, key, value))
        outputs.append(_attend(q, k, v, mask, options))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _sharing_prompts(query: Tensor, key: Tensor, value: Tensor, shared: SharedPrompts, options: Options) -> Tensor:
    """Compute attention with shared prompts. The output has shape [1, T, H, D] and is 0 at padding tokens."""
    fillers = query.shape[2] - shared.num_tokens
    query, key, value = (states[:, :, : shared.num_tokens] for states in (query, key, value))
    if options.flash or _has_varlen_kernel(query, value, options):
        key, value = (take_tokens(states, shared.keys, dim=2) for states in (key, value))
        output = _packed(query, key, value, shared.rows, options)
    else:
        output = _in_blocks(query, key, value, shared, options)
    return F.pad(output, (0, 0, 0, 0, 0, fillers))


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, shared: SharedPrompts, options: Options) -> Tensor:
    """Compute attention with shared prompts in batches of similar length, and return outputs of shape [1, T, H, D]."""

    def blocks(states: Tensor, tokens: Tensor) -> Tensor:
        """Gather the states of ``tokens``, of shape [N, L], into a tensor of shape [N, H, L, D]."""
        selected = take_tokens(states[0].transpose(0, 1), tokens.flatten())
        return selected.view(*tokens.shape, *selected.shape[1:]).transpose(1, 2)

    outputs = []
    for tokens in shared.prompt_blocks:
        positions = torch.arange(tokens.shape[1], device=query.device)[None]
        narrow = options.window is not None and tokens.shape[1] > options.window
        mask = causal_mask(positions, positions, options.window)[:, None] if narrow else None
        q, k, v = (blocks(states, tokens) for states in (query, key, value))
        outputs.append(_attend(q, k, v, mask, options))
    for (tokens, keys), mask in zip(shared.response_blocks, shared.attention_masks(options.window), strict=True):
        outputs.append(_attend(blocks(query, tokens), blocks(key, keys), blocks(value, keys), mask, options))
    flat = [states.transpose(1, 2).flatten(0, 1) for states in outputs]
    return take_tokens(torch.cat(flat), shared.block_index)[None]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rows: Rows | None, options: Options
) -> Tensor:
    """Call FlashAttention through ``transformers``, padding the values to the head dimension of the keys."""
    padding = query.shape[-1] - value.shape[-1]
    value = F.pad(value, (0, padding)) if padding else value
    bounds: Any = (None, None, None, None) if rows is None else rows
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    output: Tensor = _flash_attention_forward(
        query,
        key,
        value,
        mask,
        query_length=query.shape[1],
        is_causal=True,
        softmax_scale=options.scaling,
        sliding_window=options.window,
        softcap=options.softcap,
        cu_seq_lens_q=bounds[0],
        cu_seq_lens_k=bounds[1],
        max_length_q=bounds[2],
        max_length_k=bounds[3],
        attn_implementation=options.implementation,
    )
    return output[..., : query.shape[-1] - padding]


def _has_varlen_kernel(query: Tensor, value: Tensor, options: Options) -> bool:
    """Return whether torch's variable-length kernel supports the device, precision and head dimension."""
    half, width = query.dtype in (torch.float16, torch.bfloat16), query.shape[-1]
    fits = width <= FLASH_HEAD_WIDTH and width % 8 == 0 and value.shape[-1] == width
    return options.implementation == "sdpa" and query.is_cuda and half and fits


@cache
def grouped_query_options(kernel: Callable[..., Any]) -> dict[str, Any]:
    """Return the options that torch's variable-length attention ``kernel`` needs for grouped queries.

    In torch 2.11, which vLLM 0.24 to 0.26 require, the kernel supports grouped queries without an option.
    """
    return {"enable_gqa": True} if "enable_gqa" in signature(kernel).parameters else {}


def _varlen(query: Tensor, key: Tensor, value: Tensor, rows: Rows, options: Options) -> Tensor:
    # The kernel's window excludes the query itself.
    before = -1 if options.window is None else options.window - 1
    query, key, value = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    grouped = grouped_query_options(varlen_attn)
    output = varlen_attn(query, key, value, *rows, scale=options.scaling, window_size=(before, 0), **grouped)
    assert isinstance(output, Tensor)
    return output[None]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options) -> Tensor:
    """Compute attention for queries of shape [B, H, Q, D] and keys and values of shape [B, K, N, D].

    Returns shape [B, H, Q, D]. ``mask``, of shape [B, 1, Q, N], is True where a query attends to a key; None is causal.
    """
    if options.implementation != "sdpa":
        return _eager(query, key, value, mask, options)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=options.scaling, enable_gqa=grouped
    )


def _eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options) -> Tensor:
    """Implement :func:`_attend` with plain matrix products; ``mask`` may also be additive."""
    key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if options.scaling is None else options.scaling)
    if options.softcap is not None:
        scores = options.softcap * (scores / options.softcap).tanh()
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value


def _mask_of_padded_rows(make_mask: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
    """Call ``make_mask`` for padded sequences. Return None for packed sequences, whose mask would be too large."""
    return None if kwargs.get("attention_mask") is None else make_mask(*args, **kwargs)


AttentionMaskInterface.register("sdpa", fused_mask)
for _implementation, _function in MASK_FUNCTIONS.items():
    AttentionInterface.register(packed_name(_implementation), partial(packed_attention, implementation=_implementation))
    AttentionMaskInterface.register(packed_name(_implementation), partial(_mask_of_padded_rows, _function))
