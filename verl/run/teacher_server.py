"""Client of an external teacher server, which returns the log-probabilities of the policy's responses.

The server is ``vllm serve``, or any server whose ``/v1/completions`` accepts token ids and ``prompt_logprobs``.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.cluster.failures import MachineError
from verl.config.errors import ConfigError
from verl.config.teacher import TeacherServerConfig
from verl.utils.http import MAX_BYTES, ServerError, ask_json, key_session
from verl.utils.portable import printable

KEY = "OPENAI_API_KEY"
"""Environment variable with the server's API key, if it requires one. Messages never contain the key."""

FIELD = "teacher.server.address"

BYTES_PER_TOKEN = 1 << 10
"""Maximum size of the server's answer in bytes per token of the request, in addition to ``MAX_BYTES``."""

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

FIRST_PAUSE_S = 1.0
"""Seconds before the first retry of a request. The delay doubles with each further retry."""


class TeacherServer:
    """Client of the teacher at ``options.address``. The constructor checks the server.

    Raises ``ConfigError`` if the server does not answer, serves several models although none is selected, uses a
    different tokenizer, or does not return the log-probabilities of a prompt.

    Args:
        tokenizer: The policy's tokenizer.
        texts: Texts of the run. The server must tokenize these and ``TEXTS`` like ``tokenizer``.
    """

    def __init__(self, options: TeacherServerConfig, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self.options = options
        self._url = (options.address or "").rstrip("/")
        self.limit: int | None = None
        """The server's ``max_model_len``, or None if unknown. A prompt plus its response must be shorter."""
        self.note = ""
        """Warning that the tokenizers could not be compared, or an empty string."""
        try:
            asyncio.run(self._check(tokenizer, [text for text in (*TEXTS, *texts)[:MAX_TEXTS] if text]))
        except ServerError as error:
            raise ConfigError(f"{FIELD}={options.address!r}: {error}") from None

    def logprobs(self, batch: Batch) -> Tensor:
        """Return the teacher's log-probability of each response token of ``batch``, [M] float32, in nats.

        Raises:
            ConfigError: If a sequence reaches the server's ``limit``.
            MachineError: If a request fails ``max_retries + 1`` times.
        """
        rows = [row.tolist() for row in batch.tokens.split(batch.lengths.tolist())]
        if self.limit is not None and (longest := max(map(len, rows), default=0)) >= self.limit:
            raise ConfigError(
                f"{FIELD}={self.options.address!r}: a prompt with its response has {longest} tokens, and the server "
                f"reads {self.limit - 1}; start it with a larger --max-model-len, or lower data.max_response_length"
            )
        try:
            found = asyncio.run(self._score_all(rows))
        except ServerError as error:
            raise MachineError(f"{FIELD}={self.options.address!r}: {error}") from None
        lengths = batch.response_lengths.tolist()
        parts = [row[len(row) - length :] for row, length in zip(found, lengths, strict=True)]
        return torch.tensor([value for part in parts for value in part], dtype=torch.float32)

    # --- Requests ---

    async def _score_all(self, rows: Sequence[list[int]]) -> list[list[float]]:
        in_flight = asyncio.Semaphore(self.options.max_in_flight)
        async with self._session() as session:

            async def score(row: list[int]) -> list[float]:
                async with in_flight:
                    return await self._score(session, row)

            return await asyncio.gather(*map(score, rows))

    async def _score(self, session: aiohttp.ClientSession, row: list[int]) -> list[float]:
        """Return the log-probability of each token in ``row``, with 0 for the first token."""
        # vLLM generates at least one token, which is not read; prompt_logprobs=0 asks for the prompt's tokens alone.
        body = {"model": self.options.model, "prompt": row, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        answer = await self._ask(session, "POST", f"{self._url}/completions", body, len(row))
        try:
            listed = answer["choices"][0]["prompt_logprobs"]
            pairs = zip(listed[1:], row[1:], strict=True)
            values = [0.0, *(float(entry[str(token)]["logprob"]) for entry, token in pairs)]
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):
            fix = "the teacher needs a server that returns prompt_logprobs, such as vllm serve"
            raise ServerError(f"answered without the log-probabilities of the prompt; {fix}", again=False) from None
        if not all(LOWEST < value <= 0 for value in values):
            raise ServerError("answered log-probabilities that are not finite numbers of at most 0", again=False)
        return values

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
            ids = [token for text in texts[:1] for token in tokenizer(text, add_special_tokens=False).input_ids][:32]
            await self._score(session, ids or [0, 0])

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
                self.note = f"{FIELD}: the tokenizers are not compared, since the server cannot tell its own: {error}"
                return
            theirs = answer.get("tokens") if isinstance(answer, dict) else None
            ours = tokenizer(text, add_special_tokens=False).input_ids
            if theirs != ours:
                both = f"{theirs!r:.60} there and {ours!r:.60} here"
                raise ServerError(f"has another tokenizer than the policy: {text!r:.60} is {both}", again=False)
