"""Client of an external teacher server, which returns the log-probabilities of the policy's responses.

The server is ``vllm serve``, or any server whose ``/v1/completions`` accepts token ids and ``prompt_logprobs``.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import exp, fsum, log
from typing import Any, NamedTuple, Self

import aiohttp
import torch
from transformers import PreTrainedTokenizerBase

from verl.algorithms.divergence import NO_TOKEN
from verl.batch import Batch
from verl.cluster.failures import MachineError
from verl.config.checks import require
from verl.config.errors import ConfigError
from verl.config.teacher import TeacherServerConfig
from verl.models.micro_batches import scored_by_teachers
from verl.models.tokenizer import num_ids
from verl.utils.http import MAX_BYTES, ServerError, ask_json, key_session
from verl.utils.portable import printable

KEY = "OPENAI_API_KEY"
"""Environment variable with the server's API key, if it requires one. Messages never contain the key."""

BYTES_PER_TOKEN = 1 << 10
"""Maximum size of an answer per token of the request and per returned token, in addition to ``MAX_BYTES``."""

MAX_TEXTS = 100
"""Maximum number of texts on which the policy's and the server's tokenizers are compared."""

TEXTS = (
    *("What is 12 * 34?", " leading and trailing ", "\n\n\tdef f(x):\n        return x**2\n", "1234567890", "3.14e-10"),
    *(
        "don't DON'T Don\u2019t",
        "a" * 40,
        "\\boxed{\\frac{1}{2}}",
        "<think>\nhm\n</think>",
        "https://a.org/b?c=d&e=%20",
    ),
    *("Stra\u00dfe na\u00efve caf\u00e9", "\u4eca\u5929\u5929\u6c14", "\u041f\u0440\u0438\u0432\u0435\u0442"),
    *("\u0645\u0631\u062d\u0628\u0627", "\U0001f600\U0001f44d\U0001f3fd", "e\u0301\u200b|"),
)
"""Texts on which the tokenizers are compared, in addition to texts from the run."""

LOWEST = -1e30
"""Lower bound on valid log-probabilities, within the range of float32."""

SMALLEST = sys.float_info.min
"""Smallest probability whose logarithm is exact."""

FIRST_PAUSE_S = 1.0
"""Seconds before the first retry of a request. The delay doubles with each further retry."""


class ScoredToken(NamedTuple):
    """A server's scores at one token."""

    logprob: float
    """Log-probability of the token in nats."""
    top_logprobs: list[float]
    """Log-probabilities of the k most likely tokens, the likeliest first."""
    top_ids: list[int]
    """Ids of these tokens, or ``NO_TOKEN``."""

    @classmethod
    def of(cls, entry: Mapping[str, Any], token: int, k: int) -> Self:
        """Read an entry of ``prompt_logprobs``, which has the k most likely tokens and ``token``, if it is another."""
        listed = {int(index): float(found["logprob"]) for index, found in entry.items()}
        if min(listed) < 0:
            raise ValueError("a token has a negative id")
        top = sorted(listed, key=lambda index: (-listed[index], index))[:k]
        return cls(listed[token], [listed[index] for index in top], top)

    def without_padding(self, num_ids: int) -> Self:
        """Return the scores without ids from ``num_ids`` on, which are padding of the server's output head.

        The other probabilities are divided by 1 - m, where m is the probability of the padding among the k tokens.
        """
        is_padding = [index >= num_ids for index in self.top_ids]
        if not any(is_padding):
            return self
        pairs = list(zip(self.top_logprobs, is_padding, strict=True))
        padding, others = (fsum(exp(value) for value, padded in pairs if padded is kind) for kind in (True, False))
        # With rounded numbers, 1 - m may be less than what the other tokens have, or 0.
        shift = log(max(1 - padding, others, exp(self.logprob), SMALLEST))
        top_ids = [NO_TOKEN if padded else index for index, padded in zip(self.top_ids, is_padding, strict=True)]
        return type(self)(
            min(self.logprob - shift, 0.0), [v if padded else min(v - shift, 0.0) for v, padded in pairs], top_ids
        )


class TeacherServer:
    """Client of the teacher at ``options.address``. The constructor checks the server.

    Raises ``ConfigError`` if the server does not answer, serves several models although none is selected, uses a
    different tokenizer, or does not return the log-probabilities of a prompt.

    Args:
        tokenizer: The policy's tokenizer.
        texts: Texts of the run. The server must tokenize these and ``TEXTS`` like ``tokenizer``.
        top_k: Number of most likely tokens that the server must return at each token, or 0 for none.
        field: Option that names the server, for messages.
    """

    def __init__(
        self,
        options: TeacherServerConfig,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[str],
        top_k: int = 0,
        field: str = "teacher.server.address",
    ) -> None:
        self.options, self.top_k, self.field = options, top_k, field
        self._num_ids = num_ids(tokenizer)
        require(top_k < self._num_ids, "teacher.top_k", top_k, f"must be below the vocabulary of {self._num_ids}")
        self._url = (options.address or "").rstrip("/")
        self.limit: int | None = None
        """The server's ``max_model_len``, or None if unknown. A prompt plus its response must be shorter."""
        self.note = ""
        """Warning that the tokenizers could not be compared, or an empty string."""
        try:
            asyncio.run(self._check(tokenizer, [text for text in (*TEXTS, *texts)[:MAX_TEXTS] if text]))
        except ServerError as error:
            raise ConfigError(f"{field}={options.address!r}: {error}") from None

    def score(self, batch: Batch) -> Batch:
        """Return the episodes with the teacher's log-probability of each response token, ``teacher_logprobs``.

        With ``top_k``, they also contain its most likely tokens, ``teacher_top_k_logprobs`` and ``teacher_top_k_ids``.

        Raises:
            ConfigError: If a sequence reaches the server's ``limit``.
            MachineError: If a request fails ``max_retries + 1`` times.
        """
        # The policy may sample padding of its head, which the server's may not have.
        tokens = batch.tokens.clamp(max=self._num_ids - 1)
        rows = [row.tolist() for row in tokens.split(batch.lengths.tolist())]
        if self.limit is not None and (longest := max(map(len, rows), default=0)) >= self.limit:
            raise ConfigError(
                f"{self.field}={self.options.address!r}: a prompt with its response has {longest} tokens, and the "
                f"server reads {self.limit - 1}; start it with a larger --max-model-len, or lower "
                "data.max_response_length"
            )
        try:
            found = asyncio.run(self._score_all(rows, batch.response_lengths.tolist()))
        except ServerError as error:
            raise MachineError(f"{self.field}={self.options.address!r}: {error}") from None
        scores = [token for row in found for token in row]
        scored = batch.columns().fill(teacher_logprobs=torch.tensor([token.logprob for token in scores]))
        if self.top_k:
            logprobs, ids = (torch.tensor([token[column] for token in scores]) for column in (1, 2))
            scored.fill(teacher_top_k_logprobs=logprobs, teacher_top_k_ids=ids)
        return scored

    # --- Requests ---

    async def _score_all(self, rows: Sequence[list[int]], lengths: Sequence[int]) -> list[list[ScoredToken]]:
        in_flight = asyncio.Semaphore(self.options.max_in_flight)
        async with self._session() as session:

            async def score(row: list[int], length: int) -> list[ScoredToken]:
                async with in_flight:
                    return await self._score(session, row, length)

            return await asyncio.gather(*map(score, rows, lengths))

    async def _score(self, session: aiohttp.ClientSession, row: list[int], length: int) -> list[ScoredToken]:
        """Return the scores of the last ``length`` tokens of ``row``, fewer than all."""
        # vLLM generates at least one token, which is not read. The prompt's tokens are always among those returned.
        asked = {"prompt_logprobs": self.top_k, "max_tokens": 1, "temperature": 1.0}
        body = {"model": self.options.model, "prompt": row, **asked}
        answer = await self._ask(session, "POST", f"{self._url}/completions", body, len(row) * (self.top_k + 1))
        try:
            listed = answer["choices"][0]["prompt_logprobs"]
            pairs = list(zip(listed, row, strict=True))[len(row) - length :]
            scored = [ScoredToken.of(entry, token, self.top_k) for entry, token in pairs]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError):
            fix = "the teacher needs a server that returns prompt_logprobs, such as vllm serve"
            raise ServerError(f"answered without the log-probabilities of the prompt; {fix}", again=False) from None
        if not all(LOWEST < value <= 0 for token in scored for value in (token.logprob, *token.top_logprobs)):
            raise ServerError("answered log-probabilities that are not finite numbers of at most 0", again=False)
        if not all(len(token.top_ids) == self.top_k for token in scored):
            raise ServerError(f"answered fewer tokens than teacher.top_k={self.top_k}; lower it", again=False)
        return [token.without_padding(self._num_ids) for token in scored]

    async def _ask(
        self, session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None, num_tokens: int = 0
    ) -> Any:
        """Send a request, retrying up to ``max_retries`` times, and return the answer's JSON value."""
        pause = FIRST_PAUSE_S
        for left in reversed(range(self.options.max_retries + 1)):
            try:
                return await ask_json(session, method, url, body, MAX_BYTES + BYTES_PER_TOKEN * num_tokens)
            except ServerError as error:
                if not (error.again and left):
                    raise
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("the last repetition returns or raises")

    def _session(self) -> aiohttp.ClientSession:
        return key_session(KEY, self.options.timeout_s)

    # --- Checks ---

    async def _check(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        async with self._session() as session:
            await self._choose_model(session)
            await self._compare_tokenizers(session, tokenizer, texts)
            ids = [token for text in texts[:1] for token in tokenizer(text, add_special_tokens=False).input_ids][:31]
            await self._score(session, [0, *ids], len(ids))

    async def _choose_model(self, session: aiohttp.ClientSession) -> None:
        answer = await self._ask(session, "GET", f"{self._url}/models", None)
        try:
            models = {str(entry["id"]): entry.get("max_model_len") for entry in answer["data"]}
        except (KeyError, TypeError, AttributeError):
            raise ServerError(f"{self._url}/models answered no list of models", again=False) from None
        name = self.options.model
        if name is None and len(models) == 1:
            (name,) = models
        if name not in models:
            fix = "set teacher.server.model to one of them"
            raise ServerError(f"has the models {printable(', '.join(models)):.500}; {fix}", again=False)
        length = models[name]
        self.limit = length if isinstance(length, int) else None
        self.options = replace(self.options, model=name)

    async def _compare_tokenizers(
        self, session: aiohttp.ClientSession, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
    ) -> None:
        """Raise ``ServerError`` if the server and the policy's tokenizer tokenize a text differently."""
        url = f"{self._url.removesuffix('/v1')}/tokenize"
        for text in texts:
            body = {"model": self.options.model, "prompt": text, "add_special_tokens": False}
            try:
                answer = await self._ask(session, "POST", url, body, len(text))
            except ServerError as error:
                self.note = (
                    f"{self.field}: the tokenizers are not compared, since the server cannot tell its own: {error}"
                )
                return
            theirs = answer.get("tokens") if isinstance(answer, dict) else None
            ours = tokenizer(text, add_special_tokens=False).input_ids
            if theirs != ours:
                both = f"{theirs!r:.60} there and {ours!r:.60} here"
                raise ServerError(f"has another tokenizer than the policy: {text!r:.60} is {both}", again=False)


def ask_servers(servers: Sequence[TeacherServer], batch: Batch) -> Batch:
    """Return :meth:`TeacherServer.score` of all rows, each by the server whose index is in the column ``teacher``."""
    with ThreadPoolExecutor(len(servers)) as threads:
        return scored_by_teachers(batch, lambda index, rows: servers[index].score(rows), threads.map)
