"""Requests that a run sends to its engines. This module avoids heavy imports."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Optional

from verl.config.rollout import SamplingConfig
from vllm_patches.streams import substream

if TYPE_CHECKING:
    from verl.batch import Batch
    from verl.data.prompt_record import PromptRecord


@dataclass(frozen=True)
class ResponseRequests:
    """Requests for an engine to sample responses."""

    rows: Sequence[int]
    """Batch index of each response, which identifies the response to the caller."""
    prompt_ids: list[list[int]]
    """Prompt of each response."""
    streams: list[int]
    """Random stream from which each response is sampled. See :func:`response_stream`."""
    sampling: SamplingConfig
    overrides: list[SamplingConfig] | None = None
    """Sampling options of each response, or None to use ``sampling`` for all responses."""
    temperatures: Any = None
    """Temperature at each response position, [T] float32, or None to use the temperature in the sampling options. The
    last entry also applies to all later positions."""
    partial: Optional["Batch"] = None
    """Partial responses to resume, or None if all responses are new, have a single turn and are never interrupted. The
    batch has ``rollout_logprobs``, and also ``version`` if engines interrupt responses, or ``source`` if the
    environment extends them. New responses are empty."""
    max_tokens: list[int | None] | None = None
    """Maximum number of tokens in each response's next turn, or None to allow the remaining response length."""
    stop: list[list[str]] | None = None
    """Strings that end each response's next turn, in addition to the run's stop strings."""
    max_response_length: int | None = None
    """Maximum number of tokens in each response, or None to use the run's maximum. Setting a maximum disables the run's
    stop strings, for example for a judge's answers."""
    version: int = -1
    """Version of the current weights, used if ``partial`` has ``version``."""

    def of(self, places: Sequence[int]) -> "ResponseRequests":
        """Return the requests at the indices in ``places``."""
        names = ("rows", "prompt_ids", "streams", "overrides", "max_tokens", "stop")
        known = {name: values for name in names if (values := getattr(self, name)) is not None}
        chosen: dict[str, Any] = {name: [values[i] for i in places] for name, values in known.items()}
        return replace(self, partial=None if self.partial is None else self.partial[list(places)], **chosen)

    def sampling_of(self, i: int) -> SamplingConfig:
        return self.sampling if self.overrides is None else self.overrides[i]


@dataclass(frozen=True)
class EngineModel:
    """Model that an engine loads for an evaluation, and the conditions that end its responses."""

    path: str
    max_model_len: int
    """Maximum sequence length, including prompt and response."""
    max_response_length: int
    stop: list[str]
    """Strings that end a response when they occur in its text without special tokens."""
    stop_token_ids: list[int]
    seed: int


def response_stream(seed: int, uid: int, place: int) -> int:
    """Return the 64-bit key of the random stream for response ``place`` to the prompt ``uid``.

    Each token is sampled with one random number from the stream, indexed by the token's position in the sequence.
    """
    return substream(substream(substream(0, seed), uid), place)


def occurrences(records: Sequence["PromptRecord"]) -> list[int]:
    """Count, for each record, the earlier records with the same ``uid``. ``data.train_weights`` can repeat records."""
    seen = Counter[int]()
    counts = []
    for record in records:
        counts.append(seen[record.uid])
        seen[record.uid] += 1
    return counts


def sample_stream(seed: int, benchmark: str, problem: int, sample: int) -> int:
    """Return the 64-bit key of a sample's random stream, which does not depend on other samples or their order."""
    text = f"{seed}/{benchmark}/{problem}/{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def resolve_dtype(dtype: str, on_cpu: bool) -> str:
    """Resolve ``auto`` to float32 on a CPU and bfloat16 on a GPU."""
    return ("float32" if on_cpu else "bfloat16") if dtype == "auto" else dtype
