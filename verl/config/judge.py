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
"""Import path of the reward function that asks the judge."""

FIELDS = ("mark", "question", "response", "reference", "criteria", "key", "form", "other_response")
"""Names in braces that a judge's prompt may have; the last one only for pairs."""

RUBRIC = "a list of criteria, each a text or {criterion: TEXT, weight: NUMBER}, one of them with a weight above 0"
"""Description of a rubric, for messages."""

DEFAULT_KEY = "OPENAI_API_KEY"
"""Value of ``judge.api_key_variable`` that need not be set, because a service may need no key."""

POLICY = "policy"
"""Special value of ``judge.model.path``: the policy itself."""


@dataclass(frozen=True)
class JudgeModelConfig(Group):
    """The model that judges."""

    name: str | None
    """Name of the model at ``base_url``."""
    path: str | None
    """Folder or hub id of a frozen model in an engine of its own on the trainer's devices, asleep while the policy
    samples or learns; ``policy`` for the policy itself, with the weights that sampled the responses; or null."""
    trust_remote_code: bool
    """Allow running code from the model folder."""
    gpu_memory_utilization: Share
    """Share of GPU memory for the frozen model's engine while it judges, including weights. Other options of its engine
    are those of ``rollout``. Ignored on a CPU."""
    max_prompt_length: PositiveInt
    """Maximum number of tokens of a prompt that a model in the run judges by; a longer one is a failure."""


@dataclass(frozen=True)
class JudgeConfig(Group):
    """A language model that scores responses, beside the verifiers or alone (docs/rewards.md#a-judge)."""

    enable: bool
    """Let the judge score responses, and add its score to the verifier's or the custom function's, if there is one."""
    data_sources: Annotated[list[str], NAMES_ONCE]
    """Data sources to judge, or an empty list for all."""
    base_url: str | None
    """Address that speaks OpenAI's chat completions, such as ``http://127.0.0.1:8000/v1``, or null for a model in the
    run (``model.path``)."""
    model: JudgeModelConfig
    rubric: str | None
    """YAML or JSON file with criteria, each a text or ``{criterion: ..., weight: ...}``, or null for the record's
    column ``rubric`` or ``extra_info.rubric``, if there is one. The score is the weight of the criteria that are met
    over the sum of the positive weights, clipped to [0, 1]. Without a rubric the judge gives a score in [0, 1]."""
    criteria: Literal["together", "one_by_one"]
    """Whether one prompt asks for all criteria of the rubric, or one prompt for each."""
    pairs: bool
    """Compare each response with others of its prompt, in both orders, instead of scoring it alone. The score is the
    share of comparisons won, ties as half; if the orders disagree, it is a tie."""
    opponents: PositiveInt
    """Number of other responses of its prompt, its neighbours in a ring, to compare each response with; an odd number
    is rounded up."""
    votes: PositiveInt
    """Number of answers to average, for which a service is asked one after another; above 1, ``temperature`` must be
    above 0."""
    temperature: Temperature
    """Temperature at which the judge samples its answers; 0 decodes greedily."""
    max_tokens: PositiveInt
    """Maximum number of tokens of an answer."""
    threshold: Probability
    """Lowest score of a correct response, where no verifier or function says what is correct."""
    instructions: str | None
    """Judge's prompt, as a text or a file, with the fields of ``verl.rewards.judge.INSTRUCTIONS`` in braces; or null
    for that prompt."""
    api_key_variable: str
    """Environment variable with the key of the service, if it needs one; a name other than the default must be set. The
    key itself is never written."""
    rule_weight: float
    """Weight of the score of the verifier or custom function; 0 lets the judge score alone."""
    weight: float
    """Weight of the judge's score."""

    @property
    def is_in_run(self) -> bool:
        """Whether a model in the run judges, instead of a service."""
        return self.enable and self.model.path is not None

    @property
    def is_policy(self) -> bool:
        """Whether the policy judges its own responses."""
        return self.enable and self.model.path == POLICY

    @property
    def is_frozen(self) -> bool:
        """Whether a frozen model in an engine of the run judges."""
        return self.is_in_run and self.model.path != POLICY

    @property
    def waits(self) -> bool:
        """Whether responses are judged after sampling: by an engine of the run, or when their group is complete."""
        return self.is_in_run or (self.enable and self.pairs)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a prompt and an answer of a model in the run."""
        return self.model.max_prompt_length + self.max_tokens

    @property
    def description(self) -> str:
        """Description of who judges, for the log."""
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
        """Return the criteria in the file ``rubric``. Raises ``ConfigError`` if it has none, or malformed ones."""
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
        """Return the prompt, or None for the built-in one. Raises ``ConfigError`` if its fields are not ``FIELDS``."""
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

        All are named, null included, because columns of a record stand for arguments that are not.

        Raises ``ConfigError`` if the variable ``api_key_variable`` is not set, unless that is the default.
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
    """Return the criteria of a record: a list or its JSON, or a text, which is one criterion; none if it is empty.

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
    """Return whether ``entries`` is a list of criteria, of which one has a weight above 0."""
    try:
        return isinstance(entries, list) and max(weight for _, weight in map(read_criterion, entries)) > 0
    except ValueError:
        return False


def read_criterion(entry: Any) -> tuple[str, float]:
    """Return the text and the weight of an entry of a rubric. Raises ``ValueError`` if it is malformed."""
    criterion = {"criterion": entry} if isinstance(entry, str) else entry
    if isinstance(criterion, dict) and {*criterion} <= {"criterion", "weight"}:
        text, weight = criterion.get("criterion"), criterion.get("weight")
        weight = 1.0 if weight is None else weight  # files of tables fill entries that lack one with null
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool) and abs(weight) < 1e9
        if isinstance(text, str) and text.strip() and is_number:
            return text, float(weight)
    raise ValueError(f"criterion {entry!r:.100}: must be a text or {{criterion: TEXT, weight: NUMBER}}")
