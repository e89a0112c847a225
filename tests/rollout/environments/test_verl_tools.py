"""Tool classes written for veRL, as they are."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit import user_code
from tests.rollout.kit import RECORD, contents, multi_turn, take
from verl.config.errors import ConfigError
from verl.rollout.environments.pool import load_environment
from verl.rollout.environments.tools import tool_schemas

# In the form of veRL's own tool for GSM8K.
TOOL = """
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op


class Grader(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.instances = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        instance_id = instance_id or str(uuid4())
        self.instances[instance_id] = kwargs.get("create_kwargs", {}).get("ground_truth")
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        answer = parameters.get("answer", "")
        reward = gsm8k.compute_score(f"#### {answer}", self.instances[instance_id], method="flexible")
        return ToolResponse(text=f"{self.name}: {reward}"), reward, {}

    async def release(self, instance_id, **kwargs):
        del self.instances[instance_id]
"""

FILE = """
tools:
  - class_name: "verl.tools.grader.Grader"
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: Grades an answer.
        parameters:
          type: object
          properties: {answer: {type: string, description: The answer.}}
          required: [answer]
"""


def write_checkout(folder: Path) -> Path:
    """A checkout of veRL, as far as a tool is concerned; its YAML file."""
    (folder / "verl" / "tools").mkdir(parents=True)
    (folder / "verl" / "tools" / "judge.py").write_text(TOOL.replace("from verl.tools.", "from ."))
    (folder / "examples").mkdir()
    (folder / "examples" / "tools.yaml").write_text(FILE.replace("grader", "judge"))
    return folder / "examples" / "tools.yaml"


@pytest.mark.parametrize("shell_folder", ["", "elsewhere"])
def test_a_tool_class_of_a_checkout_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell_folder: str):
    monkeypatch.delitem(sys.modules, "verl.tools.judge", raising=False)
    file = write_checkout(tmp_path)
    if shell_folder:  # the shell is in the checkout, and the file is not
        monkeypatch.chdir(tmp_path)
        file = file.rename(tmp_path.with_suffix(".yaml"))
    assert [*load_environment(multi_turn(tool_config_path=str(file))).tools] == ["calc_gsm8k_reward"]


def test_a_tool_class_of_verls_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "grader.py").write_text(TOOL)
    (tmp_path / "tools.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    options = multi_turn(tool_config_path="tools.yaml", max_parallel_calls=2)
    info = {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "18"}}}}
    calls = [("calc_gsm8k_reward", {"answer": answer}) for answer in ("18", "17")]
    answer = take(load_environment(options), *calls, record=replace(RECORD, extra_info=info))
    assert contents(answer) == ["calc_gsm8k_reward: 1.0", "calc_gsm8k_reward: 0.0"]
    assert answer.reward == 0.0
    (schema,) = tool_schemas(options)
    assert schema["function"]["parameters"]["required"] == ["answer"]


@pytest.mark.parametrize(
    "content",
    [
        b"tools: !!python/object/apply:os.getpid []",
        b"tools: \xff",
        b"tools: []",
        b"tools: [{class_name: a.B, tool_schema: [name]}]",
        b"tools: [{class_name: a.B, tool_schema: {type: function}}]",
        b"tools: [{class_name: a.B, tool_schema: {function: {name: 5}}}]",
    ],
)
def test_another_file_is_refused_in_a_line(tmp_path: Path, content: bytes):
    (tmp_path / "tools.yaml").write_bytes(content)
    options = multi_turn(tool_config_path=str(tmp_path / "tools.yaml"))
    with pytest.raises(ConfigError, match="tools.yaml': not a list of tools with class_name and tool_schema: "):
        load_environment(options)
    with pytest.raises(ConfigError, match="reward='only': tools give no rewards; set it to add"):
        multi_turn(tool_config_path=options.tool_config_path, reward="only")


COUNTER = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionSchema, OpenAIFunctionToolSchema, ToolResponse


class Counter(BaseTool):
    def get_openai_tool_schema(self):
        described = {"name": "count", "description": "Counts.", "parameters": {"type": "object", "properties": {}}}
        return OpenAIFunctionToolSchema(type="function", function=OpenAIFunctionSchema.model_validate(described))

    async def execute(self, instance_id, parameters, **kwargs):
        data = kwargs["agent_data"]
        data.extra_fields["count"] = data.extra_fields.get("count", 0) + 1
        roles = [message["role"] for message in data.messages]
        return ToolResponse(text=f"{data.extra_fields['count']} of {data.assistant_turns}: {roles}"), 0.0, {}
"""

FUNCTIONS = '''
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse


@function_tool
def double(number: int):
    """Doubles.

    Args:
        number: The number.
    """
    return ToolResponse(text=str(2 * number)), 0.5, {"calls": 1}


@function_tool("half")
async def divide(number: int) -> dict:
    """Halves.

    Args:
        number: The number.
    """
    return {"half": number / 2}


def helper(number):
    return number
'''


def test_tool_of_verl_0_9_gets_agent_data_and_keeps_fields(tmp_path: Path):
    (tmp_path / "counter.py").write_text(COUNTER)
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: my.counter.Counter, config: {type: native}}]")
    options = multi_turn(tool_config_path=str(tmp_path / "tools.yaml"))
    assert [schema["function"]["name"] for schema in tool_schemas(options)] == ["count"]
    environment = load_environment(options)
    first = take(environment, ("count", {}))
    texts = contents(first) + contents(take(environment, ("count", {}), state=first.state))
    assert texts == [
        "1 of 1: ['user', 'assistant']",
        "2 of 2: ['user', 'assistant', 'tool', 'assistant']",
    ]


def test_function_tools_of_verl_0_9(tmp_path: Path):
    path = user_code(tmp_path, FUNCTIONS)
    options = multi_turn(function_tool_path=path, max_parallel_calls=2)
    double, half = tool_schemas(options)
    assert (double["function"]["name"], half["function"]["name"]) == ("double", "half")
    assert half["function"]["parameters"]["required"] == ["number"]
    calls = [("double", {"number": 4}), ("half", {"number": 4})]
    assert contents(take(load_environment(options), *calls)) == ["8", '{"half": 2.0}']
    user_code(tmp_path, "def helper(): ...")
    with pytest.raises(ConfigError, match="function_tool_path='.*': no function is decorated with @function_tool"):
        load_environment(options)


def test_a_class_that_is_missing_is_named(tmp_path: Path):
    (tmp_path / "tools.yaml").write_text(FILE)
    with pytest.raises(ConfigError, match="rollout.multi_turn.tool_config_path='verl.tools.grader:Grader': importing"):
        load_environment(multi_turn(tool_config_path=str(tmp_path / "tools.yaml")))


SANDBOX = """
from transformers.utils import get_json_schema
from verl.tools.base_tool import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import grading


class Sandbox(BaseTool):
    async def code_interpreter(self, code: str) -> str:
        \"\"\"Run code.

        Args:
            code: The code.
        \"\"\"

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema(**get_json_schema(self.code_interpreter))

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=f"{self.name}: {grading.grade(parameters['code'])}"), 0.0, {}
"""


def test_tool_with_a_schema_of_a_function_and_modules_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    score = tmp_path / "verl" / "utils" / "reward_score"
    score.mkdir(parents=True)
    (score / "grading.py").write_text("def grade(code):\n    return len(code)\n")
    (tmp_path / "sandbox.py").write_text(SANDBOX)
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: sandbox.Sandbox, config: {type: native}}]")
    options = multi_turn(tool_config_path=str(tmp_path / "tools.yaml"))
    (schema,) = tool_schemas(options)
    assert schema["function"]["parameters"]["required"] == ["code"]
    assert contents(take(load_environment(options), ("code_interpreter", {"code": "1 + 1"}))) == ["code_interpreter: 5"]
    # As veRL's search and sandbox-fusion tools, whose actors would start a Ray of their own.
    (tmp_path / "sandbox.py").write_text(f"import ray\n{SANDBOX}")
    with pytest.raises(
        ConfigError, match="sandbox.Sandbox uses Ray, which the processes of tools lack; write it witho"
    ):
        load_environment(options)
