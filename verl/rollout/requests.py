"""The requests and responses that travel between a run and its engines. Imports nothing heavy."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Optional

from verl.config.rollout import SamplingConfig
from vllm_patches.streams import substream

if TYPE_CHECKING:
    from verl.batch import Batch


@dataclass(frozen=True)
class ResponseRequests:
    """Responses for an engine to sample."""

    rows: Sequence[int]
    """The place of each response in the batch, its name for the caller."""
    prompt_ids: list[list[int]]
    """Of each response."""
    streams: list[int]
    """Of each response, the random numbers that decide all its draws: see :func:`response_stream`."""
    sampling: SamplingConfig
    overrides: list[SamplingConfig] | None = None
    """Of each response, in place of ``sampling``; None: that."""
    temperatures: Any = None
    """Array [T] float32, the temperatures of the tokens of every response, the last one for all later tokens, in place
    of the one temperature; None: that."""
    partial: Optional["Batch"] = None
    """Partial responses to resume, with ``rollout_logprobs``: as an engine returned them when they were cut, with
    ``version``, or as the environment has answered their last turn, with ``source``; new ones are empty. None: all are
    new, and none will be cut or has further turns."""
    version: int = -1
    """Of the weights that sample now, where ``partial`` has ``version``."""

    def of(self, places: Sequence[int]) -> "ResponseRequests":
        """Return the requests at ``places``."""
        return replace(
            self,
            rows=[self.rows[i] for i in places],
            prompt_ids=[self.prompt_ids[i] for i in places],
            streams=[self.streams[i] for i in places],
            overrides=None if self.overrides is None else [self.overrides[i] for i in places],
            partial=None if self.partial is None else self.partial[list(places)],
        )

    def sampling_of(self, i: int) -> SamplingConfig:
        """Return the sampling options of response ``i``."""
        return self.sampling if self.overrides is None else self.overrides[i]


@dataclass(frozen=True)
class EngineModel:
    """The model that an engine loads for an evaluation, and what ends its responses."""

    path: str
    max_model_len: int
    """Longest sequence, prompt and response."""
    max_response_length: int
    stop: list[str]
    """Strings that end a response where they occur in its text (without special tokens)."""
    stop_token_ids: list[int]
    seed: int


def response_stream(seed: int, uid: int, place: int) -> int:
    """Return the 64-bit random stream of response ``place`` to the prompt ``uid``.

    Each token is decided by one number of the stream, at the token's position in the sequence, prompt included.
    """
    return substream(substream(substream(0, seed), uid), place)


def sample_stream(seed: int, benchmark: str, problem: int, sample: int) -> int:
    """Return the 64-bit random stream of one sample, whatever else is generated and in which order."""
    text = f"{seed}/{benchmark}/{problem}/{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def resolve_dtype(dtype: str, on_cpu: bool) -> str:
    """Return the type: ``auto`` is float32 on a CPU and bfloat16 on a GPU."""
    return ("float32" if on_cpu else "bfloat16") if dtype == "auto" else dtype
