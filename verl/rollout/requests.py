"""What travels between an evaluation and its workers; loads nothing heavy."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class SampleRequest:
    """One response to generate."""

    key: int
    """What the caller knows it by."""
    prompt_ids: list[int]
    seed: int
    """Of the response's own random stream; see :func:`sample_seed`."""
    temperature: float


@dataclass(frozen=True)
class FinishedSample:
    """One response."""

    key: int
    response: str
    """Detokenised, without special tokens and without the stop string that ended it."""
    num_tokens: int
    """Generated, an end-of-sequence token included."""
    truncated: bool
    """Cut at its maximal length."""
    metrics: dict[str, float]
    """Rank metrics by name, of several layers as ``layer_1/<name>``; those that are not finite are left out."""


@dataclass(frozen=True)
class EngineModel:
    """What an engine loads, and what all its responses have in common."""

    path: str
    max_model_len: int
    """Longest sequence, prompt and response."""
    max_response_length: int
    stop: list[str]
    """Strings that end a response where they stand in its text, which is without special tokens."""
    stop_token_ids: list[int]
    top_p: float
    top_k: int
    seed: int


def sample_seed(seed: int, benchmark: str, problem: int, sample: int) -> int:
    """A 31-bit seed for one response: the same whatever else is generated, in whichever order and place."""
    text = f"{seed}/{benchmark}/{problem}/{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def resolve_dtype(dtype: str, on_cpu: bool) -> str:
    """``auto`` is float32 on a CPU and bfloat16 on a GPU."""
    return ("float32" if on_cpu else "bfloat16") if dtype == "auto" else dtype
