"""The method of a run as the trainer calls it: what a subclass returns is checked, and its errors name its line.

Legend: B responses, G prompts, n responses to each, T positions.
"""

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.data.prompt_rows import PromptRecord
from verl.method.method import Method, StepOutcome
from verl.rollout.requests import ResponseSettings
from verl.utils.json_state import UserState
from verl.utils.user_code import check_finite, check_signature, check_tensor, load_code, user_code

FIELD = "trainer.method"

PLACES = ("choose_prompts", "sampling", "resample", "learn_from", "change_rewards", "after_step")
"""Methods that a subclass may override."""

RENAMED = {"judged": "resample"}
"""Former name of a place -> its name."""

MAX_ROUNDS = 7
"""Maximum number of times that a prompt is sampled again in a step."""

FIELDS = ("temperature", "top_p", "top_k", "min_p")
"""Options that :meth:`Method.sampling` may set for each response."""
TABLE = "temperatures"
"""Option that it may set for each position."""


class MethodCalls:
    """The method that ``trainer.method`` names, or :class:`Method` itself.

    Raises:
        ConfigError: it cannot be loaded or made, or does not fit the other options.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[PromptRecord] = (),
        total_steps: int = 0,
    ) -> None:
        """``prompts``: the training data, by ``uid``."""
        path, kwargs = config.trainer.method, config.trainer.method_kwargs
        self.config = config
        self.where = f"{FIELD}={path!r}"
        kind: Any = Method if path is None else load_code(path, FIELD)
        if not (isinstance(kind, type) and issubclass(kind, Method)):
            raise ConfigError(f"{self.where}: must be a subclass of verl.method.Method")
        check_signature(self.where, kind, [], kwargs, f"{FIELD}_kwargs")
        self.method: Method = kind.__new__(kind)
        self.method.config, self.method.tokenizer = config, tokenizer
        self.method.prompts, self.method.total_steps = prompts, total_steps
        with user_code(f"{self.where}: {kind.__name__}(**{FIELD}_kwargs)"):
            self.method.__init__(**kwargs)  # type: ignore[misc]  # it has its attributes before __init__
        for old, new in RENAMED.items():
            if hasattr(self.method, old):
                raise ConfigError(f"{self.where}: its method {old} is now called {new}; rename it")
        for name in PLACES:
            inputs = list(inspect.signature(getattr(Method, name)).parameters)[1:]
            check_signature(f"{self.where}: its {name}", getattr(self.method, name), inputs, {})
        if path is not None and not any(map(self.overrides, PLACES)):
            raise ConfigError(f"{self.where}: overrides none of {', '.join(PLACES)}")
        has = (self.overrides("state_dict"), self.overrides("load_state_dict"))
        self._state = UserState(self.where, self.method, has)
        self._check_options()

    def overrides(self, name: str) -> bool:
        """Whether a subclass changes the place ``name``."""
        return getattr(type(self.method), name) is not getattr(Method, name)

    @property
    def note(self) -> str:
        """A note on the method for the user; empty if there is nothing."""
        if self.overrides("after_step") and not self._state.exists:
            return f"{self.where}: has after_step but no state_dict, so a resumed run forgets what after_step was told"
        return ""

    @property
    def candidates_per_prompt(self) -> int:
        """Prompts that are read for each that is sampled."""
        return self.method.candidates_per_prompt

    def begin_step(self, step: int) -> None:
        """Say which step is in progress."""
        self.method.step = step

    # --- The places of a step ---

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Return the prompts to sample."""
        chosen, most = self._call("choose_prompts", list(candidates)), len(candidates) // self.candidates_per_prompt
        known = Counter(map(id, candidates))
        fits = isinstance(chosen, Sequence) and 1 <= len(chosen) <= most and Counter(map(id, chosen)) <= known
        self._require(fits, "choose_prompts", chosen, f"it must return 1 to {most} different ones of the candidates")
        return list(chosen)

    def settings(self, records: Sequence[PromptRecord]) -> ResponseSettings | None:
        """How the responses to these prompts are sampled; None: as the options say."""
        if not self.overrides("sampling"):
            return None
        settings = self._call("sampling", list(records))
        return response_settings(settings, len(records), self.config, self._place("sampling"))

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Return the prompts to sample again by their place in ``batch``, in ascending order."""
        edited, num = self._call("resample", batch, round), len(batch) // self.config.rollout.n
        fits = isinstance(edited, Mapping) and all(
            type(place) is int and 0 <= place < num and isinstance(record, PromptRecord)
            for place, record in edited.items()
        )
        must = (
            f"it must return a mapping from places of prompts, 0 to {num - 1}, to what edit_prompt makes; {{}} for none"
        )
        self._require(fits, "resample", edited, must)
        limit = self.config.data.max_prompt_length
        for record in edited.values():
            if len(record.input_ids) > limit:
                raise ConfigError(
                    f"data.max_prompt_length={limit}: {self._place('resample')} edited prompt {record.uid} to "
                    f"{len(record.input_ids)} tokens; raise it, or shorten what is added (len(record.input_ids))"
                )
        return dict(sorted(edited.items()))

    def learn_from(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Return the batch to learn from, and metrics. Without an override, ``batch`` itself."""
        if not self.overrides("learn_from"):
            return batch, {}
        n, step = self.config.rollout.n, self.method.step
        # A prompt that comes again in a later step makes another group.
        group = (step << 32) + torch.arange(len(batch) // n).repeat_interleave(n)
        sampled = batch.columns(*batch.names).fill(group=group, learned=batch.learned.clone())
        chosen = self._call("learn_from", sampled)
        self._require(isinstance(chosen, Batch), "learn_from", chosen, "it must return a Batch, such as batch[rows]")
        self._check_learned(chosen, batch)
        replayed = chosen.step < step
        metrics = {
            "learn_from/responses": float(len(chosen)),
            "learn_from/learned": float(chosen.learned.sum()),
            "learn_from/replayed": float(replayed.sum()),
        }
        if replayed.any():
            metrics["learn_from/age/mean"] = (step - chosen.step[replayed]).double().mean().item()
        return chosen, metrics

    def change_rewards(self, batch: Batch, rewards: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the rewards [B] float64, and metrics of the change."""
        if not self.overrides("change_rewards"):
            return rewards, {}
        changed = self._call("change_rewards", batch, rewards.clone())
        where = self._place("change_rewards")
        check_tensor(where, changed, rewards.shape)
        check_finite(where, changed)
        changed = changed.detach().cpu().double()
        metrics = {"mean": changed.mean().item(), "change": (changed - rewards).mean().item()}
        return changed, {f"change_rewards/{name}": value for name, value in metrics.items()}

    def after_step(self, outcome: StepOutcome) -> None:
        """Tell the method how the step went."""
        self._call("after_step", outcome)

    # --- State ---

    def state(self) -> Any:
        """Return the state for checkpoints, as JSON; None for a method without state."""
        return self._state.save()

    def load_state(self, state: Any) -> None:
        """Restore :meth:`state`. Raises ``ConfigError`` for the state of another method."""
        self._state.load(state)

    def _call(self, name: str, *arguments: Any) -> Any:
        with user_code(f"{self.where}: its {name}"):
            return getattr(self.method, name)(*arguments)

    def _place(self, name: str) -> str:
        """Name the option and the override, with its file and line."""
        code = getattr(type(self.method), name)
        line = inspect.unwrap(code).__code__.co_firstlineno
        return f"{self.where}: its {name} ({inspect.getsourcefile(code)}, line {line})"

    def _require(self, fits: bool, name: str, returned: Any, must: str) -> None:
        if not fits:
            raise ConfigError(f"{self._place(name)} returned {str(returned):.80}; {must}")

    def _check_learned(self, chosen: Batch, batch: Batch) -> None:
        where, most, step = self._place("learn_from"), self.method.max_learned, self.method.step
        missing = [name for name in batch.names if name not in chosen]
        if missing:
            raise ConfigError(f"{where} returned a batch without the column {missing[0]!r}")
        learned = int(chosen.learned.sum())
        if not 1 <= len(chosen) <= 2 * most or learned > most:
            raise ConfigError(
                f"{where} returned {len(chosen)} responses, {learned} of them to learn from; must be from 1 to "
                f"{2 * most}, and at most {most} to learn from"
            )
        if (chosen.step > step).any() or (chosen.step < 1).any():
            raise ConfigError(f"{where} returned responses of steps that are not 1 to {step}")
        limits = (self.config.data.max_prompt_length, self.config.data.max_response_length)
        lengths = (int(chosen.prompt_lengths.max()), chosen.width)
        if lengths[0] > limits[0] or lengths[1] != limits[1]:
            raise ConfigError(
                f"data.max_prompt_length={limits[0]}, data.max_response_length={limits[1]}: {where} returned responses "
                "that were sampled with other limits; set them back"
            )

    def _check_options(self) -> None:
        """Raise ``ConfigError`` where a place of the method and another option exclude each other."""
        fix = "compares with a greedy response of this step, which this place does not see; choose another"
        for name in ("learn_from", "change_rewards"):
            if self.config.algorithm.adv_estimator == "remax" and self.overrides(name):
                raise ConfigError(f"algorithm.adv_estimator='remax': {self.where} overrides {name}; remax {fix}")
        if self.overrides("sampling") and not self.config.rollout.seeded:
            raise ConfigError(
                f"rollout.seeded=False: {self.where} overrides sampling, which the project's own sampler obeys; set it "
                "to true"
            )
        staleness = self.config.async_training.max_staleness
        for name in ("resample", "sampling"):
            if staleness and self.overrides(name):
                raise ConfigError(
                    f"async_training.max_staleness={staleness}: {self.where} overrides {name}, which would see "
                    "responses of several steps; set it to 0"
                )
        learns = [name for name in ("learn_from", "change_rewards") if self.overrides(name)]
        if self.config.samples_ahead and self.overrides("choose_prompts") and learns:
            raise ConfigError(
                f"async_training.max_staleness={staleness}: {self.where} overrides choose_prompts and {learns[0]}, and "
                "engines of their own sample while the models learn; set it to 0"
            )
        if self.method.candidates_per_prompt < 1:
            raise ConfigError(f"{self.where}: candidates_per_prompt={self.method.candidates_per_prompt}: at least 1")


def response_settings(settings: Any, num_prompts: int, config: PPOConfig, where: str) -> ResponseSettings | None:
    """Return the settings of the G n responses to ``num_prompts`` prompts; None: ``config``'s for all.

    Raises:
        ConfigError: they are not in their ranges and shapes; begins with ``where``.
    """
    names, base = (*FIELDS, TABLE), config.rollout.train_kwargs
    if settings is None or (isinstance(settings, Mapping) and not settings):
        return None
    if not isinstance(settings, Mapping) or not set(settings) <= set(names):
        raise ConfigError(f"{where} returned {str(settings):.80}; it must map some of {', '.join(names)}")
    fields = {name: settings[name] for name in FIELDS if name in settings}
    overrides = _overrides(fields, num_prompts, base, where) if fields else None
    table = _table(settings[TABLE], config.data.max_response_length, where) if TABLE in settings else None
    return ResponseSettings(overrides, table)


def _overrides(fields: Mapping[str, Any], num_prompts: int, base: SamplingConfig, where: str) -> list[SamplingConfig]:
    """Return the settings of each response; equal ones are one object."""
    made: dict[tuple[Any, ...], SamplingConfig] = {}
    shape = (num_prompts, base.n)
    columns = [_numbers(f"{where}: {name}", values, shape).ravel().tolist() for name, values in fields.items()]
    rows = list(zip(*columns, strict=True))
    for row in set(rows):
        values = dict(zip(fields, row, strict=True))
        if "top_k" in values:
            if not values["top_k"].is_integer():
                raise ConfigError(f"{where}: top_k={values['top_k']}: must be whole")
            values["top_k"] = int(values["top_k"])
        if values.get("temperature") == 0:
            raise ConfigError(f"{where}: temperature=0: training needs sampling; return one above 0")
        try:
            made[row] = replace(base, **values)
        except ConfigError as error:  # names the field and its value
            raise ConfigError(f"{where}: {error}") from error
    return [made[row] for row in rows]


def _table(values: Any, max_positions: int, where: str) -> NDArray[np.float32]:
    """Temperatures [T] float32, T at most ``max_positions``."""
    table = _numbers(f"{where}: {TABLE}", values).astype(np.float32)
    if table.ndim != 1 or not 1 <= len(table) <= max_positions or not ((table >= 0.01) & (table <= 1000)).all():
        shape = list(table.shape)
        raise ConfigError(f"{where}: {TABLE} of shape {shape} must be 1 to {max_positions} numbers from 0.01 to 1000")
    return table


def _numbers(what: str, values: Any, shape: tuple[int, int] | None = None) -> NDArray[np.float64]:
    """``values`` as an array, of ``shape`` = [G, n] if there is one."""
    try:
        array = np.asarray(values, dtype=np.float64)
        return array if shape is None else np.broadcast_to(array, shape)
    except (TypeError, ValueError) as error:
        must = "numbers" if shape is None else f"numbers that broadcast to [G, n]={list(shape)}"
        raise ConfigError(f"{what} is {str(values):.80}; it must be {must}") from error
