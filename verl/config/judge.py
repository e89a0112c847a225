"""Config group ``reward_score.judge``: a language model that scores responses."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

import yaml

from verl.config.checks import NAMES_ONCE, Group, PositiveInt, Probability, Share, require
from verl.config.common import Temperature

JUDGE = "verl.rewards.judge:judge"
"""Import path of the reward function that queries the judge."""

FIELDS = ("mark", "question", "response", "reference", "criteria", "key", "form", "other_response")
"""Placeholders allowed in the judge's prompt; the last one is only for pairwise comparisons."""

RUBRIC = "a list of criteria, each a text or {criterion: TEXT, weight: NUMBER}, one of them with a weight above 0"
"""Description of the rubric format for error messages."""

DEFAULT_KEY = "OPENAI_API_KEY"
"""Default of ``judge.api_key_variable``. This variable may be unset, because some services need no key."""

POLICY = "policy"
"""Value of ``judge.model.path`` that makes the policy the judge."""


@dataclass(frozen=True)
class JudgeModelConfig(Group):
    """The model that judges."""

    name: str | None
    """Name of the model at ``base_url``."""
    path: str | None
    """Folder or hub id of a frozen model, ``policy`` for the weights that sampled the responses, or null. A frozen
    model runs in a separate engine on the trainer's devices. The engine sleeps while the policy samples or trains."""
    trust_remote_code: bool
    """Allow running code from the model folder."""
    gpu_memory_utilization: Share
    """Fraction of GPU memory for the frozen model's engine while it judges, including weights. All other options of the
    engine are those of ``rollout``. Ignored on a CPU."""
    max_prompt_length: PositiveInt
    """Maximum prompt length in tokens for a local judge. Longer prompts count as failures."""


@dataclass(frozen=True)
class JudgeConfig(Group):
    """A language model that scores responses, alone or in addition to the verifiers (docs/rewards.md#a-judge)."""

    enable: bool
    """Score responses with the judge, and add its score to that of the verifier or custom function, if there is one."""
    data_sources: Annotated[list[str], NAMES_ONCE]
    """Data sources whose responses are judged, or an empty list for all."""
    base_url: str | None
    """Address of a server with OpenAI's chat completions API, such as ``http://127.0.0.1:8000/v1``, or null for a local
    model (``model.path``)."""
    model: JudgeModelConfig
    rubric: str | None
    """YAML or JSON file with criteria, each a string or ``{criterion: ..., weight: ...}``. Null uses the record's
    ``rubric`` or ``extra_info.rubric``, if any. The score is the sum of the weights of all fulfilled criteria, divided
    by the sum of the positive weights and clipped to [0, 1]. Without a rubric, the judge returns a score in [0, 1]."""
    criteria: Literal["together", "one_by_one"]
    """Whether the judge checks all criteria of the rubric in one prompt, or each in a separate prompt."""
    pairs: bool
    """Compare each response with other responses to the same prompt, in both orders, instead of scoring it alone. The
    score is the fraction of comparisons won. Ties count as half a win, and contradictory results as ties."""
    opponents: PositiveInt
    """Number of other responses to compare each response with, rounded up to an even number. A prompt's responses form
    a ring, and each is compared with its nearest neighbours."""
    votes: PositiveInt
    """Number of judge answers to average. Requests for them to a server are sequential. Values above 1 require a
    ``temperature`` above 0."""
    temperature: Temperature
    """Sampling temperature of the judge; 0 decodes greedily."""
    max_tokens: PositiveInt
    """Maximum number of tokens in the judge's answer."""
    threshold: Probability
    """Minimum score of responses that count as correct, unless a verifier or custom function determines correctness."""
    instructions: str | None
    """Prompt for the judge, as text or a file, with the placeholders of ``verl.rewards.judge.INSTRUCTIONS``; null uses
    ``INSTRUCTIONS`` itself."""
    api_key_variable: str
    """Environment variable that contains the server's API key. Only the default variable may be unset. The key itself
    is never written to a file."""
    rule_weight: float
    """Weight of the verifier's or custom function's score; with 0, only the judge's score counts."""
    weight: float
    """Weight of the judge's score."""

    @property
    def is_in_run(self) -> bool:
        """Whether the judge is a local model rather than a model on a server."""
        return self.enable and self.model.path is not None

    @property
    def is_policy(self) -> bool:
        """Whether the policy judges its own responses."""
        return self.enable and self.model.path == POLICY

    @property
    def is_frozen(self) -> bool:
        """Whether the judge is a local, frozen model."""
        return self.is_in_run and self.model.path != POLICY

    @property
    def waits(self) -> bool:
        """Whether responses are judged after sampling, because the judge runs in an engine or compares responses."""
        return self.is_in_run or (self.enable and self.pairs)

    @property
    def max_length(self) -> int:
        """Maximum combined length in tokens of prompt and answer for a local judge."""
        return self.model.max_prompt_length + self.max_tokens

    @property
    def description(self) -> str:
        """Description of the judge for logs."""
        if self.is_policy:
            return "the policy itself, with the weights that sampled the responses"
        return f"{self.model.path}, frozen" if self.is_frozen else f"{self.model.name} at {self.base_url}"

    def check(self) -> None:
        fix = "must begin with http:// or https://, as in http://127.0.0.1:8000/v1"
        self.require(self.base_url is None or self.base_url.startswith(("http://", "https://")), "base_url", fix)
        # The address appears in files and messages, and so would a key in the place of its variable.
        fix = "must have no user and password; set the variable of api_key_variable"
        require("@" not in (self.base_url or ""), "base_url", "...", fix)
        fix = "must have no ? and #; set the variable of api_key_variable, or put a proxy before the service"
        require(not {*"?#"} & {*(self.base_url or "")}, "base_url", "...", fix)
        is_name = re.fullmatch("[A-Z_][A-Z0-9_]*", self.api_key_variable) is not None
        fix = "must be the name of an environment variable in capitals, such as OPENAI_API_KEY; set the key there"
        require(is_name, "api_key_variable", "...", fix)
        if not self.enable:
            return
        fix = "name a service, or a model in the run as reward_score.judge.model.path"
        self.require(self.base_url is not None or self.model.path is not None, "base_url", fix)
        fix = f"there is one judge, and model.path={self.model.path!r} names it; leave out one of them"
        self.require(self.base_url is None or self.model.path is None, "base_url", fix)
        fix = "name the model at base_url" if self.base_url else "is a name at base_url; leave it out"
        self.require((self.model.name is None) == (self.base_url is None), "model.name", fix)
        fix = "greedy answers are all the same; raise temperature, or set it to 1"
        self.require(self.votes == 1 or self.temperature > 0, "votes", fix)
        fix = "a comparison weighs all criteria; set it to together"
        self.require(not self.pairs or self.criteria == "together", "criteria", fix)
        self.require(self.weight != 0, "weight", "leaves the judge without effect; set enable=false")
        self.rubric_entries()
        self.instructions_text()

    def rubric_entries(self) -> list[Any] | None:
        """Return the criteria in the file ``rubric``. Raises ``ConfigError`` if the file contains no valid criteria."""
        if self.rubric is None:
            return None
        try:
            found = yaml.safe_load(Path(self.rubric).read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            found, why = None, f" ({' '.join(str(error).split()):.200})"
        else:
            why = ""
        self.require(is_rubric(found), "rubric", f"must be a YAML or JSON file with {RUBRIC}{why}")
        return list(found)

    def instructions_text(self) -> str | None:
        """Return the judge's prompt, or None for the default. Raises ``ConfigError`` if placeholders are invalid."""
        if self.instructions is None:
            return None
        text, known = self.instructions, FIELDS if self.pairs else FIELDS[:-1]
        if "{" not in text:
            try:
                text = Path(text).read_text()
            except (OSError, ValueError):
                self.require(False, "instructions", "is no file that can be read, and a prompt needs {response}")
        try:
            fields = [field for _, *field in Formatter().parse(text) if field[0] is not None]
        except ValueError as error:
            require(False, "instructions", f"{text:.80}", f"{error}; write {{{{ and }}}} for braces")
        names = [name for name, _, _ in fields]
        for name, form, conversion in fields:
            require(name in known, "instructions", f"{{{name}}}", f"the fields are {', '.join(known)}")
            fix = "is filled with text as it is; leave out what follows : or !"
            require(not form and not conversion, "instructions", f"{{{name}}}", fix)
        needed = ["mark", "response", *(["other_response"] if self.pairs else [])]
        missing = [f"{{{name}}}" for name in needed if name not in names]
        require(not missing, "instructions", f"{text:.80}", f"lacks {', '.join(missing)}")
        return text

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the function ``JUDGE``.

        Arguments that are None are included, because missing arguments would be taken from the columns of a record.

        Raises ``ConfigError`` if the variable ``api_key_variable`` is not set, unless it is the default.
        """
        is_set = self.base_url is None or self.api_key_variable in (DEFAULT_KEY, *os.environ)
        self.require(is_set, "api_key_variable", "is not set; export the key of the service there")
        names = ("base_url", "votes", "temperature", "max_tokens", "threshold", "api_key_variable")
        return {
            **{name: getattr(self, name) for name in names},
            **({} if self.pairs else {"other_response": None}),
            "rubric": self.rubric_entries(),
            "instructions": self.instructions_text(),
            "model": self.model.name,
            "one_by_one": self.criteria == "one_by_one",
        }


def read_rubric(value: Any) -> list[Any]:
    """Return the criteria of a rubric, which may be a list, a list as JSON, the text of a single criterion, or empty.

    Raises ``ValueError`` if the rubric is malformed.
    """
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = None
        value = parsed if isinstance(parsed, list | dict) else [value] if value.strip() else []
    if value is None or value == []:
        return []
    if not is_rubric(value):
        raise ValueError(f"rubric={value!r:.200}: must be {RUBRIC}")
    return list(value)


def is_rubric(entries: Any) -> bool:
    """Return whether ``entries`` is a list of criteria, at least one of which has a positive weight."""
    try:
        return isinstance(entries, list) and max(weight for _, weight in map(read_criterion, entries)) > 0
    except ValueError:
        return False


def read_criterion(entry: Any) -> tuple[str, float]:
    """Return the text and the weight of one criterion of a rubric. Raises ``ValueError`` if the entry is malformed."""
    criterion = {"criterion": entry} if isinstance(entry, str) else entry
    if isinstance(criterion, dict) and {*criterion} <= {"criterion", "weight"}:
        text, weight = criterion.get("criterion"), criterion.get("weight")
        weight = 1.0 if weight is None else weight  # files of tables fill entries that lack one with null
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool) and abs(weight) < 1e9
        if isinstance(text, str) and text.strip() and is_number:
            return text, float(weight)
    raise ValueError(f"criterion {entry!r:.100}: must be a text or {{criterion: TEXT, weight: NUMBER}}")
