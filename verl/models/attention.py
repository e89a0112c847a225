"""Attention over packed rows: several sequences joined to one without padding, each attending only to itself.

``transformers`` picks a model's attention function, and what makes its mask, by a name in the model's config. Importing
this module registers its own functions, named by :func:`packed_name`. The keyword arguments that ``transformers``
has for FlashAttention (``cu_seq_lens_q``, ``max_length_q``, ...) tell them where the rows are, and ``sequence_group``
which workers share the tokens. Without these they do what the implementation they stand for does, so that a model
loaded for packed rows still reads padded ones.

Legend: H query heads, K key and value heads, T tokens, D head width.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, Self, cast

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
from verl.models.sequence_parallel import gather_heads, split_heads
from verl.models.shared_prompts import SharedPrompts, attend_in_blocks

MASK_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "eager": eager_mask,
    "sdpa": sdpa_mask,
    "flash_attention_2": flash_attention_mask,
    "flash_attention_3": flash_attention_mask,
}
"""Implementations that support packed rows -> the function that makes the mask of their padded rows."""

UNSUPPORTED = ("s_aux", "position_bias", "indices", "block_indices")
"""Arguments of attention functions that change the result and that packed rows do not support."""

WINDOWS_IN_MASKS = ("PhimoeAttention", "Qwen2MoeAttention")
"""Attention of ``transformers`` whose sliding window is in its mask alone, which packed rows do not have."""

FLASH_HEAD_WIDTH = 256
"""Largest head width of the variable-length kernel."""


def grouped_query_options(kernel: Callable[..., Any]) -> dict[str, Any]:
    """Options of ``kernel``, torch's variable-length attention, for fewer heads of keys than of queries.

    The kernel of torch 2.11, which vLLM 0.24 to 0.26 pin, has no such option and supports them without it.
    """
    return {"enable_gqa": True} if "enable_gqa" in signature(kernel).parameters else {}


GROUPED_QUERY_OPTIONS = grouped_query_options(varlen_attn)


def attention_name(config: ModelConfig) -> str:
    """What ``transformers`` calls the attention that ``config`` asks for."""
    return packed_name(config.attn_implementation) if config.use_remove_padding else config.attn_implementation


def packed_name(implementation: str) -> str:
    """The name under which packed attention like ``implementation`` is registered.

    It must contain neither "sdpa" nor "flash": ``transformers`` looks for these in names and would treat ours as its
    own.
    """
    return {"sdpa": "packed_fused", "eager": "packed_eager"}.get(implementation, f"packed_fa{implementation[-1]}")


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
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function of ``transformers``, causal.

    Args:
        query: [B, H, T, D]; with packed rows B is 1, and with ``sequence_group`` T counts this worker's tokens only.
        key, value: [B, K, T, D].
        attention_mask: of padded rows, as the implementation expects it; None for packed ones.
        implementation: the attention function of ``transformers`` that this one stands for.
        scaling: factor on the scores, by default 1 / sqrt(D).
        sliding_window: tokens that each one sees, itself included; None: as the module has it in its mask.
        softcap: bound on the scores by ``softcap * tanh(scores / softcap)``; None: none.
        cu_seq_lens_q: [rows + 1] int32, where rows start and end; None: the rows are padded.
        max_length_q: longest row.
        sequence_group: workers that share the tokens; None: this one has all.
        shared_prompts: where prompts stand that several rows share; None: each row has its own.
        is_causal: whether tokens see only those before them; None: as the module has it.

    Returns:
        [B, T, H, D], contiguous, and None in place of attention weights.

    Raises:
        ConfigError: the model's attention has a feature that is not supported here.
    """
    assert dropout == 0.0, "models score and learn without dropout"
    wrong = [name for name in UNSUPPORTED if others.get(name) is not None]
    if softcap is not None and implementation == "sdpa":
        wrong.append("softcap")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        wrong.append("is_causal=False")
    if attention_mask is not None and (cu_seq_lens_q is not None or shared_prompts is not None):
        wrong.append("a mask of its own")
    if wrong:
        raise ConfigError(
            f"model.attn_implementation={implementation!r}: packed rows do not support {', '.join(wrong)}, which "
            f"{type(module).__name__} uses; set model.use_remove_padding=false, or, for softcap only, "
            "model.attn_implementation=eager or flash_attention_2"
        )
    if sliding_window is None:
        sliding_window = window_in_mask(module)
    options: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
    if shared_prompts is not None:
        fillers = query.shape[2] - shared_prompts.num_tokens
        query, key, value = (states[:, :, : shared_prompts.num_tokens] for states in (query, key, value))
        output = _sharing_prompts(query, key, value, shared_prompts, implementation, **options)
        return F.pad(output, (0, 0, 0, 0, 0, fillers)).contiguous(), None
    if cu_seq_lens_q is None:
        return _padded(module, query, key, value, attention_mask, implementation, **options), None
    assert max_length_q is not None, "comes with cu_seq_lens_q"
    if sequence_group is not None:
        query, key, value = (split_heads(states[0], sequence_group)[None] for states in (query, key, value))
    rows = Rows.alike(cu_seq_lens_q, max_length_q)
    if implementation.startswith("flash"):
        output = _flash(implementation, query, key, value, None, rows, **options)
    elif implementation == "sdpa" and _has_varlen_kernel(query, value):
        output = _varlen(query, key, value, rows, scaling, sliding_window)
    else:
        attend = _fused if implementation == "sdpa" else _eager
        output = _row_by_row(attend, query, key, value, cu_seq_lens_q, **options)
    if sequence_group is not None:
        output = gather_heads(output[0].transpose(0, 1), sequence_group).transpose(0, 1)[None]
    return output.contiguous(), None


def window_in_mask(module: nn.Module) -> int | None:
    """The sliding window of attention that has it in its mask alone; None for any other, and for layers without one."""
    if type(module).__name__ not in WINDOWS_IN_MASKS:
        return None
    config: Any = module.config
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or kinds[cast(int, module.layer_idx)] == "sliding_attention"
    return cast(int | None, config.sliding_window) if slides else None


class Rows(NamedTuple):
    """Where rows start and end in a packed sequence, [rows + 1] int32, and how long the longest is."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def alike(cls, bounds: Tensor, longest: int) -> Self:
        """Rows of as many keys as queries."""
        return cls(bounds, bounds, longest, longest)


def _sharing_prompts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared_prompts: SharedPrompts,
    implementation: str,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """[1, T, H, D], with the options of :func:`packed_attention`."""
    if implementation.startswith("flash") or (implementation == "sdpa" and _has_varlen_kernel(query, value)):
        # These kernels align a row's last query with its last key.
        rows = Rows(*shared_prompts.bounds, *shared_prompts.longest)
        key, value = (states.index_select(2, shared_prompts.keys) for states in (key, value))
        if implementation.startswith("flash"):
            return _flash(implementation, query, key, value, None, rows, scaling, sliding_window, softcap)
        return _varlen(query, key, value, rows, scaling, sliding_window)
    attend = _fused if implementation == "sdpa" else _eager

    def with_options(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return attend(query, key, value, mask, scaling, softcap)

    return attend_in_blocks(with_options, query, key, value, shared_prompts, sliding_window)


def _padded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    implementation: str,
    **options: Any,
) -> Tensor:
    if implementation.startswith("flash"):
        return _flash(implementation, query, key, value, attention_mask, None, **options)
    if implementation == "sdpa":
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=options["scaling"])[0]
    return _eager(query, key, value, attention_mask, options["scaling"], options["softcap"]).transpose(1, 2)


def _flash(
    implementation: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    rows: Rows | None,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """The FlashAttention package, by way of ``transformers``; it has one width for keys and values."""
    narrower = query.shape[-1] - value.shape[-1]
    value = F.pad(value, (0, narrower)) if narrower else value
    bounds: tuple[Any, ...] = (None, None, None, None) if rows is None else rows
    output: Tensor = _flash_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attention_mask,
        query_length=query.shape[2],
        is_causal=True,
        softmax_scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        cu_seq_lens_q=bounds[0],
        cu_seq_lens_k=bounds[1],
        max_length_q=bounds[2],
        max_length_k=bounds[3],
        attn_implementation=implementation,
    )
    return output[..., : query.shape[-1] - narrower]


def _has_varlen_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether torch's variable-length attention takes these states: on GPUs, in half precision, of fitting width."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    return query.is_cuda and half and width <= FLASH_HEAD_WIDTH and width % 8 == 0 and value.shape[-1] == width


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Rows,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    # The kernel's window does not count the token itself.
    before = -1 if sliding_window is None else sliding_window - 1
    query, key, value = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    output = varlen_attn(
        query,
        key,
        value,
        *rows,
        scale=scaling,
        window_size=(before, 0),
        **GROUPED_QUERY_OPTIONS,
    )
    assert isinstance(output, Tensor)
    return output[None]


def _row_by_row(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """[1, T, H, D] by ``attend``, one row after another."""
    outputs = []
    bounds = cu_seq_lens.tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        length = end - start
        mask = None
        if sliding_window is not None and length > sliding_window:
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - sliding_window)
        parts = (states[:, :, start:end] for states in (query, key, value))
        outputs.append(attend(*parts, mask, scaling, softcap))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    assert softcap is None, "refused before"
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _eager(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """[B, H, T, D] by plain matrix products; ``mask``: bool, true where seen, or to be added; None: causal."""
    key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value


def _mask_of_padded_rows(make: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
    """No mask for packed rows, which have none of their own: its size would be the square of their tokens."""
    return None if kwargs.get("attention_mask") is None else make(*args, **kwargs)


for _implementation, _make in MASK_FUNCTIONS.items():
    AttentionInterface.register(packed_name(_implementation), partial(packed_attention, implementation=_implementation))
    AttentionMaskInterface.register(packed_name(_implementation), partial(_mask_of_padded_rows, _make))
