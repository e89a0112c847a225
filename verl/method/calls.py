"""Validated calls to a user-defined method, with error messages that contain the method's file and line.

Legend: B responses, G prompts, n responses per prompt, T token positions.
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
from verl.data.prompt_record import PromptRecord
from verl.method.method import Method, StepOutcome
from verl.utils.json_state import UserState
from verl.utils.user_code import check_finite, check_signature, check_tensor, load_code, user_code

FIELD = "trainer.method"

HOOKS = ("choose_prompts", "sampling", "resample", "learn_from", "shape_rewards", "after_step")
"""Names of the hooks that a subclass can override."""

RENAMED = {"judged": "resample", "change_rewards": "shape_rewards"}
"""Maps the former name of each renamed hook to its current name."""

MAX_ROUNDS = 7
"""Maximum number of times that a prompt can be resampled in a step."""

FIELDS = ("temperature", "top_p", "top_k", "min_p")
"""Sampling parameters that :meth:`Method.sampling` can set per response."""
TABLE = "temperatures"
"""Sampling parameter that :meth:`Method.sampling` can set per token position."""


class MethodCalls:
    """Validating wrapper around the method that ``trainer.method`` selects (:class:`Method` by default).

    Raises ``ConfigError`` if the method cannot be loaded or constructed, or conflicts with other options.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[PromptRecord] = (),
        total_steps: int = 0,
    ) -> None:
        """Load the method; ``prompts`` contains the training data, indexed by ``uid``."""
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
            self.method.__init__(**kwargs)  # type: ignore[misc]  # the attributes are set before __init__
        for old, new in RENAMED.items():
            if hasattr(self.method, old):
                raise ConfigError(f"{self.where}: its method {old} is now called {new}; rename it")
        for name in HOOKS:
            inputs = list(inspect.signature(getattr(Method, name)).parameters)[1:]
            check_signature(f"{self.where}: its {name}", getattr(self.method, name), inputs, {})
        if path is not None and not any(map(self.overrides, HOOKS)):
            raise ConfigError(f"{self.where}: overrides none of {', '.join(HOOKS)}")
        has = (self.overrides("state_dict"), self.overrides("load_state_dict"))
        self._state = UserState(self.where, self.method, has)
        self._check_options()

    def overrides(self, name: str) -> bool:
        """Return whether the method overrides the hook ``name``."""
        return getattr(type(self.method), name) is not getattr(Method, name)

    @property
    def note(self) -> str:
        """Warning that state of the method may not be saved, or an empty string."""
        if self.overrides("after_step") and not self._state.exists:
            return f"{self.where}: has after_step but no state_dict, so a resumed run forgets what after_step was told"
        return ""

    @property
    def candidates_per_prompt(self) -> int:
        """Number of candidate prompts to read for each prompt in a batch."""
        return self.method.candidates_per_prompt

    def begin_step(self, step: int) -> None:
        """Set the number of the current step."""
        self.method.step = step

    # --- Hooks ---

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Return the prompts to sample responses for."""
        chosen, most = self._call("choose_prompts", list(candidates)), len(candidates) // self.candidates_per_prompt
        known = Counter(map(id, candidates))
        fits = isinstance(chosen, Sequence) and 1 <= len(chosen) <= most and Counter(map(id, chosen)) <= known
        self._require(fits, "choose_prompts", chosen, f"it must return 1 to {most} different ones of the candidates")
        return list(chosen)

    def settings(self, records: Sequence[PromptRecord]) -> dict[str, Any] | None:
        """Return ``overrides`` and ``temperatures`` for sampling ``records``, or None to use the config."""
        settings = self._call("sampling", list(records)) if self.overrides("sampling") else None
        where, base, names = self._location("sampling"), self.config.rollout.train_kwargs, (*FIELDS, TABLE)
        fits = settings is None or (isinstance(settings, Mapping) and set(settings) <= set(names))
        self._require(fits, "sampling", settings, f"it must map some of {', '.join(names)}")
        if not settings:
            return None
        fields = {name: settings[name] for name in FIELDS if name in settings}
        overrides = _overrides(fields, len(records), base, where) if fields else None
        limit = self.config.data.max_response_length
        table = _table(settings[TABLE], limit, where) if TABLE in settings else None
        return {"overrides": overrides, TABLE: table}

    def resample(self, batch: Batch, round: int) -> dict[int, PromptRecord]:
        """Return the prompts to resample, keyed and sorted by their index in ``batch``."""
        edited, num = self._call("resample", batch, round), len(batch) // self.config.rollout.n
        fits = isinstance(edited, Mapping) and all(
            type(place) is int and 0 <= place < num and isinstance(record, PromptRecord)
            for place, record in edited.items()
        )
        must = f"it must map indices of prompts, 0 to {num - 1}, to records that edit_prompt returned; {{}} for none"
        self._require(fits, "resample", edited, must)
        limit = self.config.data.max_prompt_length
        for record in edited.values():
            if len(record.input_ids) > limit:
                raise ConfigError(
                    f"data.max_prompt_length={limit}: {self._location('resample')} edited prompt {record.uid} to "
                    f"{len(record.input_ids)} tokens; raise it, or shorten what is added (len(record.input_ids))"
                )
        return dict(sorted(edited.items()))

    def learn_from(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Return the batch to train on, which is ``batch`` if the hook is not overridden, and metrics."""
        if not self.overrides("learn_from"):
            return batch, {}
        n, step = self.config.rollout.n, self.method.step
        # Responses to the same prompt in different steps belong to different groups.
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

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the shaped rewards, a float64 tensor of shape [B], and metrics of their change."""
        if not self.overrides("shape_rewards"):
            return rewards, {}
        changed = self._call("shape_rewards", batch, rewards.clone())
        where = self._location("shape_rewards")
        check_tensor(where, changed, rewards.shape)
        check_finite(where, changed)
        changed = changed.detach().cpu().double()
        metrics = {"mean": changed.mean().item(), "change": (changed - rewards).mean().item()}
        return changed, {f"shape_rewards/{name}": value for name, value in metrics.items()}

    def after_step(self, outcome: StepOutcome) -> None:
        """Pass the outcome of a step to the method."""
        self._call("after_step", outcome)

    # --- State ---

    def state(self) -> Any:
        """Return the state for checkpoints as JSON, or None if the method has no state."""
        return self._state.save()

    def load_state(self, state: Any) -> None:
        """Restore a saved state. Raises ``ConfigError`` if the state was saved by a different method."""
        self._state.load(state)

    def _call(self, name: str, *arguments: Any) -> Any:
        with user_code(f"{self.where}: its {name}"):
            return getattr(self.method, name)(*arguments)

    def _location(self, name: str) -> str:
        """Describe a hook for error messages by its option and the file and line of the override."""
        code = getattr(type(self.method), name)
        line = inspect.unwrap(code).__code__.co_firstlineno
        return f"{self.where}: its {name} ({inspect.getsourcefile(code)}, line {line})"

    def _require(self, fits: bool, name: str, returned: Any, must: str) -> None:
        if not fits:
            raise ConfigError(f"{self._location(name)} returned {str(returned):.80}; {must}")

    def _check_learned(self, chosen: Batch, batch: Batch) -> None:
        where, most, step = self._location("learn_from"), self.method.max_learned, self.method.step
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
                "that were sampled with other limits; restore the limits"
            )

    def _check_options(self) -> None:
        """Raise ``ConfigError`` if an overridden hook is incompatible with another option."""
        config, learning = self.config, [name for name in ("learn_from", "shape_rewards") if self.overrides(name)]
        staleness = config.async_training.max_staleness
        stale = f"async_training.max_staleness={staleness}"
        conflicts = [
            ("algorithm.adv_estimator='remax'", name, "which has no greedy response to compare with; use another one")
            for name in learning
            if config.algorithm.adv_estimator == "remax"
        ]
        if self.overrides("sampling") and not config.rollout.seeded:
            conflicts.append(("rollout.seeded=False", "sampling", "which needs the seeded sampler; set it to true"))
        if staleness:
            why = "which would see responses of several steps; set it to 0"
            conflicts += [(stale, name, why) for name in ("resample", "sampling") if self.overrides(name)]
        if config.samples_ahead and self.overrides("choose_prompts") and learning:
            why = f"which would run during {learning[0]}; set it to 0"
            conflicts.append((stale, "choose_prompts", why))
        if conflicts:
            option, name, why = conflicts[0]
            raise ConfigError(f"{option}: {self.where} overrides {name}, {why}")
        if self.method.candidates_per_prompt < 1:
            raise ConfigError(f"{self.where}: candidates_per_prompt={self.method.candidates_per_prompt}: at least 1")


def _overrides(fields: Mapping[str, Any], num_prompts: int, base: SamplingConfig, where: str) -> list[SamplingConfig]:
    """Return the sampling parameters of all G * n responses, with one shared object per combination of parameters.

    Raises a ``ConfigError`` that contains ``where`` if a parameter is out of range or has the wrong shape.
    """
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
    """Return validated float32 temperatures of shape [T], with T <= ``max_positions``."""
    table = _numbers(f"{where}: {TABLE}", values).astype(np.float32)
    if table.ndim != 1 or not 1 <= len(table) <= max_positions or not ((table >= 0.01) & (table <= 1000)).all():
        shape = list(table.shape)
        raise ConfigError(f"{where}: {TABLE} of shape {shape} must be 1 to {max_positions} numbers from 0.01 to 1000")
    return table


def _numbers(what: str, values: Any, shape: tuple[int, int] | None = None) -> NDArray[np.float64]:
    """Convert ``values`` to an array and broadcast it to ``shape`` [G, n] unless ``shape`` is None."""
    try:
        array = np.asarray(values, dtype=np.float64)
        return array if shape is None else np.broadcast_to(array, shape)
    except (TypeError, ValueError) as error:
        must = "numbers" if shape is None else f"numbers that broadcast to [G, n]={list(shape)}"
        raise ConfigError(f"{what} is {str(values):.80}; it must be {must}") from error
