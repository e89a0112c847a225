"""What run_ppo refuses before it starts Ray."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch.distributed.checkpoint as dcp
from conftest import small_overrides
from huggingface_hub import constants
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from verl.checkpoint.attempts import Attempt
from verl.checkpoint.folders import begin_checkpoint, complete_checkpoint
from verl.checkpoint.resume import Resumption
from verl.config import PPOConfig, load_config
from verl.config.errors import ConfigError
from verl.data.prompt_rows import PromptRecord
from verl.data.records import rl_record
from verl.method.calls import MethodCalls
from verl.rank.reward_manager import RewardManager
from verl.run import setup as run_setup
from verl.run.session import TrainingRun
from verl.run.setup import check_method_and_loss
from verl.run.warnings import form_warnings, start_warnings
from verl.trainer.ppo import run as run_module
from verl.trainer.ppo.run import run_ppo
from verl.workers.policy_loss import PolicyLoss

LENGTH = r"^data.max_prompt_length\+data.max_response_length"


@pytest.fixture
def refused(tiny_model: Path, arithmetic_prompts: Path, tmp_path: Path) -> Callable[..., None]:
    """Checks that a run with these overrides is refused with a message, before Ray starts."""

    def check(message: str, *overrides: str) -> None:
        small = small_overrides(tiny_model, arithmetic_prompts, tmp_path)
        config = load_config(PPOConfig, "ppo_trainer", [*small, *overrides])
        was_running = ray.is_initialized()
        with pytest.raises(ConfigError, match=message):
            run_ppo(config)
        assert ray.is_initialized() == was_running

    return check


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "reward_score.custom_functions=['*=no_such_module:score']",
            "importing it raised ModuleNotFoundError: No module named .no_such_module",
        ),
        ("trainer.logger=[console,mlflow]", "^trainer.logger='mlflow': mlflow is not installed; `pip install mlflow`"),
        ("algorithm=gae trainer.critic_warmup=2", "^trainer.critic_warmup=2: the run has 2 steps, which leaves none"),
        ("data.max_response_length=500", rf"{LENGTH}=\d+: model.path=.* takes sequences of 512 tokens"),
        (
            "reward_model.enable=true reward_model.max_length=513",
            r"^reward_model.max_length=513: reward_model.model.path",
        ),
        ("data.template=qwen_boxed", "^data.template='qwen_boxed': no such template; did you mean 'qwen-boxed'"),
        ("data.sampler.class_path=no.py data.sampler.class_name=A", "^data.sampler.class_path='no.py': no such file"),
        ("calculator.layers=[0,4]", r"^calculator.layers=\[0, 4\]: the model has 4 layers, from -4 to 3$"),
    ],
)
def test_an_option_that_does_not_fit_is_named(refused, tiny_model, overrides: str, message: str):
    refused(message, f"reward_model.model.path={tiny_model}", *overrides.split())


def test_mistakes_in_data_and_sizes_are_told_together(refused, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n')
    data = [f"data.{kind}_files=[{tmp_path}/bad.jsonl]" for kind in ("train", "val")]
    refused(
        r"(?s)^.*bad\.jsonl.*lacks the columns.*\ndata.max_prompt_length.*=532: ", *data, "data.max_response_length=500"
    )


REWARD = """
def wrong(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1} if solution_str == ground_truth else 0.0
"""


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        pytest.param(
            *("*={}:wrong", r"{}:wrong on data_source='arithmetic' returned a dict of \['acc'\]; .* \({}, line 2\)$"),
            marks=pytest.mark.slow,
        ),
        ("gsm8k={}:wrong", "no prompt has the data_source 'gsm8k'; the data have arithmetic$"),
    ],
)
def test_a_reward_function_is_tried_on_a_record(refused, tmp_path, entry: str, message: str):
    (tmp_path / "mine.py").write_text(REWARD)
    path = f"{tmp_path}/mine.py"
    refused(message.format(path, path), f"reward_score.custom_functions=['{entry.format(path)}']")


class Reached(Exception):
    """Every check is passed; the workers would start."""


@pytest.fixture
def reach(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The workers of a run of the paper's settings with 30 validation prompts, once nothing is left but to start."""
    for kind, count in (("train", 100), ("val", 30)):
        about = {"data_source": "arithmetic", "split": kind, "category": "sum"}
        rows = [rl_record(**about, question=f"{i}+1=", ground_truth=f"{i + 1}", index=i) for i in range(count)]
        (tmp_path / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(run: TrainingRun, *_: object) -> None:
        raise Reached(run.world_size)

    monkeypatch.setattr(run_setup, "resolve_device", lambda *_: "cuda")
    monkeypatch.setattr(TrainingRun, "start", start)

    def check(*overrides: str) -> int:
        data = [f"data.{kind}_files=[{tmp_path}/{kind}.jsonl]" for kind in ("train", "val")]
        model = [f"model.path={tiny_model}", "+model.override_config.max_position_embeddings=4096"]
        fixed = ["preset=paper", "trainer=gpus8", "data.template=abel", f"trainer.default_local_dir={tmp_path}/run"]
        with pytest.raises(Reached) as reached:
            run_ppo(load_config(PPOConfig, "ppo_trainer", [*fixed, *model, *data, *overrides]))
        found: int = reached.value.args[0]
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


def test_other_models_need_the_policys_vocabulary_or_a_tokenizer(refused, tiny_model, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model / name, tmp_path)
    judge = ("reward_model.enable=true", f"reward_model.model.path={tmp_path}")
    refused("^reward_model.model.path=.*: no tokenizer there", *judge)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.save_pretrained(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    critic = ("algorithm=gae", f"critic.model.path={tmp_path}")
    refused("^critic.model.path=.*: reads the policy's token numbers, but 2 of these 262 differ: 'a' is", *critic)


def test_a_model_that_the_hub_cannot_give_ends_the_run_before_it_starts(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    refused("^model.path='org/model': HF_HUB_OFFLINE is set, and the cache has no complete", "model.path=org/model")


@pytest.fixture
def checkpoint(small_config: PPOConfig, tiny_model: Path, tmp_path: Path) -> Path:
    """A checkpoint of step 1 that fits the small config."""
    folder = begin_checkpoint(Attempt(tmp_path, 0), 1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    writer = HuggingFaceStorageWriter(str(folder / "actor" / "shards"), save_distributed=True)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    state = {"job": "ppo", "num_examples": 16, "shuffle": small_config.data.shuffle, "order": "", "method": None}
    state["reward_manager"] = RewardManager(small_config.reward_manager).state_dict()
    return complete_checkpoint(folder, 1, json.dumps(state))


def test_another_order_of_prompts_than_the_checkpoints(refused, checkpoint):
    # Both lie in the same folder.
    refused("^data.shuffle=False: was True when .*/global_step_1 was written", "data.shuffle=false")
    mixed = "^data.train_weights=\\[2.0\\]: .*/global_step_1 was written with neither, so the position"
    refused(mixed, "data.train_weights=[2]")


@pytest.mark.slow
def test_validation_alone_names_no_model(small_config, checkpoint, tmp_path, monkeypatch, capsys):
    class Validated:
        """A trainer that has validated the checkpoint."""

        step, validations, timer = 1, {1: {"val/pass@1": 0.5}}, SimpleNamespace(totals={"testing": 1.0})

        def __init__(self, *_: object) -> None: ...

        def restore(self, resumption: Resumption) -> None:
            assert resumption.folder == checkpoint

        def fit(self) -> None: ...

    tracker = SimpleNamespace(add=lambda sink: None)
    monkeypatch.setattr(run_module.TrainingRun, "start", lambda *_: (tracker, None))
    monkeypatch.setattr(run_module, "RolloutScheduler", lambda *_: None)
    monkeypatch.setattr(run_module, "ResponseRewards", lambda *_: None)
    monkeypatch.setattr(run_module, "RayPPOTrainer", Validated)
    folder = tmp_path / "validation"
    trainer = replace(small_config.trainer, val_only=True, default_local_dir=str(folder))
    trainer = replace(trainer, resume_mode="path", resume_from_path=str(checkpoint))
    run_ppo(replace(small_config, trainer=trainer))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"resuming from {checkpoint}" and lines[-1] == f"metrics: {folder}/metrics.jsonl"
    assert not [line for line in lines if line.startswith("model: ")]
    assert json.loads((folder / "summary.json").read_text())["after"] == {"val/pass@1": 0.5}


KL = "actor.kl_loss_type="
ALONE = "rollout.n=1: {} compares the responses to a prompt"


@pytest.mark.parametrize(
    ("options", "beginning"),
    [
        (f"{KL}k1", f"{KL}k1: as a loss its gradient vanishes in expectation"),
        (f"{KL}kl", f"{KL}kl: as a loss its gradient vanishes in expectation"),
        (
            "calculator.diff_stride=80",
            "calculator.diff_stride=80: even a response of data.max_response_length=160 tokens has 1 prefix, so "
            "velocity (ERV) and acceleration (ERA) are 0; set calculator.diff_stride=19 or less",
        ),
        (
            "calculator.diff_stride=79",
            "calculator.diff_stride=79: even a response of data.max_response_length=160 tokens",
        ),
        ("calculator.diff_stride=53", None),
        ("calculator.diff_stride=79 calculator.prefix_rule=after_stride_and_whole", None),
        ("calculator.diff_stride=80 calculator.compute_diff=false reward_manager=unshaped", None),
        (f"{KL}k1 actor.use_unbiased_kl=true", None),
        (f"{KL}k1 actor.kl_loss_coef=0", None),
        (f"{KL}k1 actor.use_kl_loss=false", None),
        *((f"{KL}{name}", None) for name in ("k1+", "abs", "low_var_kl")),
        *((f"algorithm={n} rollout.n=1", ALONE.format(n)) for n in ("grpo", "rloo", "reinforce_plus_plus_baseline")),
        (
            "experiment=dapo actor.policy_loss=gspo",
            "actor.policy_loss=gspo: the clip range (0.2, 0.28) is one of tokens",
        ),
        (
            "experiment=ead actor.tis_level=none",
            "trainer.method='verl.recipes.ead:Annealed': overrides sampling, so responses come from other distr",
        ),
        ("experiment=ead", None),
        ("experiment=verl_grpo_async actor.ppo_mini_batch_size=48", None),
        (
            "experiment=verl_grpo_async",
            "async_training.max_staleness=1: a step makes 2 updates of the policy (actor.ppo_mini_batch_size=24, "
            "actor.ppo_epochs=1), so its last learns from tokens that are up to 3 updates old; set ",
        ),
    ],
)
def test_options_that_are_probably_a_mistake_are_warned_of(options: str, beginning: str | None):
    config = load_config(PPOConfig, "ppo_trainer", options.split())
    lines = start_warnings(config, MethodCalls(config, None))
    assert len(lines) == (beginning is not None)
    assert all(line.startswith(beginning) for line in lines)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("verl.recipes.pacs:pacs_loss", "all responses to a prompt"),
        ("verl.recipes.rover:rover_loss", "with the policy"),
    ],
)
def test_a_loss_that_a_composed_batch_does_not_serve(loss: str, message: str):
    config = load_config(PPOConfig, "ppo_trainer", ["experiment=rorecomp", f"actor.policy_loss={loss}"])
    with pytest.raises(ConfigError, match=f"^trainer.method='.*': overrides learn_from, but .*{message}"):
        check_method_and_loss(config, MethodCalls(config, None), PolicyLoss(config.actor))


@pytest.mark.parametrize(
    ("mode", "source", "prompts", "beginning"),
    [
        ("independent", "gsm8k", ["How many? Put it into \\boxed{}."], None),
        ("independent", "gsm8k", ["How many? Answer after ####."], None),
        (
            "independent",
            "gsm8k",
            ["How many?", "Which box? \\boxed{}"],
            "1 of the first 2 prompts of data_source='gsm8k'",
        ),
        (
            "independent",
            "math",
            ["Answer in <answer></answer>."],
            "1 of the first 1 prompts of data_source='math' ask for <",
        ),
        ("independent", "countdown", ["How many?"], None),
        ("mix", "gsm8k", ["How many?"], None),
    ],
)
def test_prompts_that_ask_for_another_form_than_the_score_rewards(tiny_tokenizer, mode, source, prompts, beginning):
    records = [
        PromptRecord(i, tiny_tokenizer.encode(text), source, "7", {}, [{"role": "user", "content": text}], False)
        for i, text in enumerate(prompts)
    ]
    lines = form_warnings(mode, records, tiny_tokenizer)
    assert len(lines) == (beginning is not None)
    assert all(line.startswith(f"reward_score.mode='independent': {beginning}") for line in lines)
