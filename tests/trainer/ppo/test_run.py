"""What run_ppo refuses before it starts Ray."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.kit import (
    begin_checkpoint,
    edit_json,
    edit_vocabulary,
    jsonl,
    matches,
    ppo_config,
    save_shards,
    small_overrides,
    user_code,
)
from tests.tables import refusals
from verl.checkpoint.folders import complete_checkpoint
from verl.config import PPOConfig
from verl.config.errors import ConfigError
from verl.data.prompt_record import PromptRecord
from verl.data.records import rl_record
from verl.method.calls import MethodCalls
from verl.rank.reward_manager import RewardManager
from verl.run import setup as run_setup
from verl.run.display import RunDisplay
from verl.run.session import TrainingRun
from verl.run.setup import check_method_and_loss, check_teacher_sources
from verl.run.warnings import form_warnings, start_notes, start_warnings
from verl.trainer.ppo.run import run_ppo, show_validations
from verl.workers.policy_loss import CustomLoss


@pytest.fixture
def start(tiny_model: Path, arithmetic_prompts: Path, tmp_path: Path) -> Callable[..., None]:
    """Starts a run that must be refused before Ray starts."""

    def start(*overrides: str) -> None:
        was_running = ray.is_initialized()
        try:
            run_ppo(ppo_config(*small_overrides(tiny_model, arithmetic_prompts, tmp_path), *overrides))
        finally:
            assert ray.is_initialized() == was_running

    return start


@pytest.mark.parametrize(("overrides", "line"), refusals("trainer/refusals.txt", "runs"))
def test_option_that_does_not_fit_is_refused(start, refused, tiny_model: Path, overrides: str, line: str):
    with refused(line, MODEL=tiny_model):
        start(f"reward_model.model.path={tiny_model}", overrides)


def test_mistakes_in_data_and_sizes_are_raised_together(start, tmp_path: Path):
    path = jsonl(tmp_path / "bad.jsonl", {"prompt": "x"})
    data, sizes = r"bad\.jsonl.*lacks the columns", r"data\.max_prompt_length.*=532: "
    with pytest.raises(ConfigError, match=rf"(?s)^.*{data}.*\n{sizes}"):
        start(f"data.train_files=[{path}]", f"data.val_files=[{path}]", "data.max_response_length=500")


def test_validation_files_of_another_task_are_named(start, refused, tmp_path: Path):
    rows = jsonl(tmp_path / "own.jsonl", *({"question": f"What is {i} + 1?", "answer": f"{i + 1}"} for i in range(4)))
    named = [f"data.train_files=[{rows}]", "data.prompt_key=question", "data.answer_key=answer"]
    validation = "data.val_files=[data/arithmetic/test.parquet]"
    with refused("data.val_files=[...]: are still the embedded task's; name your own, or set data.val_files=[] (...)"):
        start(*named, "data.data_source=math", validation)


REWARD = """
def wrong(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1} if solution_str == ground_truth else 0.0
"""
WRONG = "returned a dict of ['acc']; ... (TMP/mine.py, line 2)"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        pytest.param("*", f"...TMP/mine.py:wrong on data_source='arithmetic' {WRONG}", marks=pytest.mark.slow),
        ("gsm8k", "...no prompt has the data_source 'gsm8k'; the data have arithmetic"),
        ("a==b", "...custom_functions='a==b=TMP/mine.py:wrong': no prompt has the data_source 'a=b'; the data have..."),
    ],
)
def test_reward_function_is_tried_on_a_record(start, refused, tmp_path: Path, source: str, line: str):
    with refused(line):
        start(f"reward_score.custom_functions=['{source}={user_code(tmp_path, REWARD)}:wrong']")


def test_every_data_source_has_a_teacher(refused):
    sources = 'teacher.by_source=["a=/m","b=/n","c=/m"]'
    teacher = ppo_config(sources, "teacher.model.path=/d").teacher
    assert [teacher.index_of(source) for source in "abcd"] == [1, 2, 1, 0]
    assert [*teacher.models] == ["teacher.model", "teacher.by_source[a]", "teacher.by_source[b]"]
    alone = ppo_config(sources)
    check_teacher_sources(alone, ["c", "a", "b"])
    with refused("teacher.by_source=[...]: the data_source 'd' has no teacher; name teachers for them, or one for..."):
        check_teacher_sources(alone, ["a", "b", "c", "d"])
    with refused("teacher.by_source=[...]: no prompt has the data_source 'c'; the data have a, b"):
        check_teacher_sources(alone, ["a", "b"])
    with refused("by_source=[...]: the data_source 'd' has no teacher; name one for it, or for all other sources"):
        alone.teacher.indices_of(["a", "d"])
    assert alone.teacher.indices_of(["b", "a"]) == [1, 0]
    marks = ppo_config('teacher.by_source=["org/set@v1#main?=http://s/v1"]').teacher
    assert marks.sources == {"org/set@v1#main?": "http://s/v1"}
    addresses = 'teacher.by_source=["a=http://s/v1","b=http://t/v1"]'
    servers = ppo_config(addresses, "teacher.server.model=m").teacher.servers
    assert [(name, server.address, server.model) for name, server in servers.items()] == [
        ("teacher.by_source[a]", "http://s/v1", "m"),
        ("teacher.by_source[b]", "http://t/v1", "m"),
    ]
    equals = 'teacher.by_source=["lang==en=/lr=1/m","==x===Q/m"]'
    assert ppo_config(equals).teacher.sources == {"lang=en": "/lr=1/m", "=x=": "Q/m"}


class Reached(Exception):
    """Every check is passed; the workers would start."""


@pytest.fixture
def reach(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The workers of a run of the paper's settings with 30 validation prompts, once nothing is left but to start."""
    for kind, count in (("train", 100), ("val", 30)):
        about = {"data_source": "arithmetic", "split": kind, "category": "sum"}
        rows = [rl_record(**about, question=f"{i}+1=", ground_truth=f"{i + 1}", index=i) for i in range(count)]
        jsonl(tmp_path / f"{kind}.jsonl", *rows)

    def reached(run: TrainingRun, *_: object) -> None:
        raise Reached(run.world_size)

    monkeypatch.setattr(run_setup, "resolve_device", lambda *_: "cuda")
    monkeypatch.setattr(TrainingRun, "start", reached)

    def check(*overrides: str) -> int:
        data = [f"data.{kind}_files=[{tmp_path}/{kind}.jsonl]" for kind in ("train", "val")]
        model = [f"model.path={tiny_model}", "+model.override_config.max_position_embeddings=4096"]
        fixed = ["preset=paper", "trainer=gpus8", "data.template=abel", f"trainer.default_local_dir={tmp_path}/run"]
        with pytest.raises(Reached) as caught:
            run_ppo(ppo_config(*fixed, *model, *data, *overrides))
        found: int = caught.value.args[0]
        return found

    return check


TENSOR, SEQUENCE = (
    "rollout.tensor_parallel_size=",
    "model.use_remove_padding=true model.ulysses_sequence_parallel_size=",
)


@pytest.mark.parametrize(
    ("machines", "options"),
    [
        (2, f"experiment=verl_ppo {TENSOR}8"),
        (4, f"experiment=dapo {SEQUENCE}4"),
        (8, f"experiment=verl_ppo {TENSOR}2 {SEQUENCE}4"),
    ],
)
def test_any_batch_fits_any_world(reach, machines: int, options: str):
    """48 prompts, mini-batches of 24 and 30 validation prompts on 16, 32 and 64 GPUs."""
    assert reach(f"trainer.nnodes={machines}", *options.split()) == 8 * machines


def test_other_models_need_the_vocabulary_of_the_policy(start, refused, tiny_model: Path, tmp_path: Path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model / name, tmp_path)
    with refused("reward_model.model.path='TMP': no tokenizer there..."):
        start("reward_model.enable=true", f"reward_model.model.path={tmp_path}")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    edit_vocabulary(tmp_path, swap=("a", "b"))
    with refused("critic.model.path='TMP': reads the policy's token numbers, but 2 of these 262 differ: 'a' is..."):
        start("algorithm=gae", f"critic.model.path={tmp_path}")
    with refused("teacher.by_source[arithmetic]='TMP': reads the policy's token numbers, but 2 of these 262..."):
        start(f'teacher.by_source=["arithmetic={tmp_path}"]')
    shallow = Path(shutil.copytree(tiny_model, tmp_path / "shallow"))
    edit_json(shallow / "config.json", num_hidden_layers=1, layer_types=["full_attention"])
    with refused("calculator.layers=[-3, -1]: teacher.by_source[arithmetic] has 1 layers, from -1 to 0"):
        options = ["teacher.rank_metrics=true", "calculator.layers=[-3,-1]"]
        start(f'teacher.by_source=["arithmetic={shallow}"]', *options)


@pytest.fixture
def checkpoint(small_config: PPOConfig, tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint of step 1 that fits the small config."""
    folder = begin_checkpoint(tmp_path, 1)
    save_shards(folder, dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters()))
    state: dict[str, Any] = {"job": "ppo", "num_examples": 16, "shuffle": small_config.data.shuffle, "order": ""}
    state |= {"method": None, "reward_manager": RewardManager(small_config.reward_manager).state_dict()}
    return lambda **others: complete_checkpoint(folder, 1, json.dumps(state | others))


def test_another_order_of_prompts_is_refused_on_resume(start, refused, checkpoint):
    checkpoint()
    # Both lie in the same folder.
    with refused("data.shuffle=False: was True when TMP/global_step_1 was written..."):
        start("data.shuffle=false")
    with refused("data.train_weights=[2.0]: TMP/global_step_1 was written with neither, so the position..."):
        start("data.train_weights=[2]")


def test_other_records_are_refused_on_resume(start, refused, checkpoint):
    checkpoint(digests={"data.train_files[0]": "of others"})
    with refused(
        "data.train_files[0]: not what it was when TMP/global_step_1 was written, so this would be another..."
    ):
        start()


@pytest.mark.parametrize(("options", "line"), refusals("trainer/refusals.txt", "warnings"))
def test_probably_wrong_options_are_warned(options: str, line: str):
    config = ppo_config(options)
    found = start_warnings(config, MethodCalls(config, None))
    assert [matches(line, warning) for warning in found] == [True] * (line != "none")


def test_uneven_mini_batches_and_a_critic_are_noted():
    assert start_notes(ppo_config()) == []
    uneven, critic = start_notes(
        ppo_config("data.train_batch_size=50 actor.ppo_mini_batch_size=24 algorithm=gae critic.model.path=c")
    )
    assert uneven.startswith("actor.ppo_mini_batch_size=24: does not divide data.train_batch_size=50; ")
    assert uneven.endswith(" learns from 2 prompts alone")
    assert critic.startswith(
        "algorithm.adv_estimator=gae: trains a critic beside the policy, from critic.model.path=c;"
    )


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        ("verl.recipes.pacs:pacs_loss", "all responses to a prompt"),
        ("verl.recipes.rover:rover_loss", "with the policy"),
    ],
)
def test_loss_that_a_composed_batch_cannot_serve_is_refused(refused, loss: str, why: str):
    config = ppo_config(f"experiment=rorecomp actor.policy_loss={loss}")
    with refused(f"trainer.method='...': overrides learn_from, but ...{why}..."):
        check_method_and_loss(config, MethodCalls(config, None), CustomLoss(config.actor))


@pytest.mark.parametrize(
    ("mode", "source", "prompts", "beginning"),
    [
        ("independent", "gsm8k", ["How many? Put it into \\boxed{}."], None),
        ("independent", "gsm8k", ["How many? Answer after ####."], None),
        ("independent", "gsm8k", ["How many?", "Which box? \\boxed{}"], "1 of the first 2 prompts"),
        ("independent", "math", ["Answer in <answer></answer>."], "1 of the first 1 prompts"),
        ("independent", "countdown", ["How many?"], None),
        ("mix", "gsm8k", ["How many?"], None),
    ],
)
def test_prompts_with_an_unrewarded_answer_form_are_warned(tiny_tokenizer, mode, source, prompts, beginning):
    records = [
        PromptRecord(i, tiny_tokenizer.encode(text), source, "7", {}, [{"role": "user", "content": text}], False)
        for i, text in enumerate(prompts)
    ]
    lines = form_warnings(mode, records, tiny_tokenizer)
    assert len(lines) == (beginning is not None)
    assert all(line.startswith(f"reward_score.mode='independent': {beginning}") for line in lines)


def test_last_table_says_how_validation_sampled(capsys):
    sampled = {"temperature": 0.6, "top_p": 0.95, "n": 4}
    kwargs = [f"rollout.val_kwargs.{name}={value}" for name, value in sampled.items()]
    for options, title in (([], "greedy, n=1"), (kwargs, "temperature 0.6, top_p 0.95, n=4")):
        values = {0: {"val/pass@1": 0.25}, 8: {"val/pass@1": 0.5}}
        show_validations(RunDisplay("run", 8, {}), values, ppo_config(*options).rollout.val_kwargs)
        assert f"Validation ({title})" in " ".join(capsys.readouterr().out.split())
