"""veRL's groups ``data``, ``trainer`` and of the system: what each option becomes here."""

from verl.cli.values import FlagError
from verl.cli.verl_conversions import (
    Line,
    Option,
    accepted,
    by,
    count_or_zero,
    entries,
    files,
    frequency,
    is_null,
    names,
    only,
    path,
    refused,
    same,
    to,
    unquoted,
)
from verl.cli.verl_models import CLASS, PROFILER, SPEED, unless_null
from verl.config.overrides import NOT_SUPPORTED

_IMAGES = accepted("names a column of images; rows with images are refused")
_COLUMNS = accepted("how batches are laid out inside veRL")


def _seed(value: str, line: Line) -> list[str]:
    return [] if is_null(value) else [f"seed={same(value)}"]


DATA_OPTIONS = {
    f"data.{name}": option
    for name, option in {
        "tokenizer": only(["null"], "the tokenizer is read from the model's folder", "put it there"),
        "use_shm": SPEED,
        "train_files": to("data.train_files", convert=files),
        "val_files": to("data.val_files", convert=files),
        "train_max_samples": to("data.train_max_samples"),
        "val_max_samples": to("data.val_sample_size"),
        "prompt_key": to("data.prompt_key"),
        "reward_fn_key": to("data.reward_fn_key"),
        "max_prompt_length": to("data.max_prompt_length"),
        "max_response_length": to("data.max_response_length"),
        "train_batch_size": to("data.train_batch_size"),
        "gen_batch_size": to("data.gen_batch_size"),
        "val_batch_size": unless_null("data.val_batch_size"),
        "tool_config_path": only(["null"], NOT_SUPPORTED["data.tool_config_path"]),
        "return_raw_input_ids": _COLUMNS,
        "return_raw_chat": _COLUMNS,
        "return_full_prompt": _COLUMNS,
        "return_multi_modal_inputs": _IMAGES,
        "shuffle": to("data.shuffle"),
        "seed": by("`seed`; null: left as it is", _seed),
        "dataloader_num_workers": SPEED,
        "image_patch_size": _IMAGES,
        "image_key": _IMAGES,
        "video_key": _IMAGES,
        "validation_shuffle": accepted("the order of validation prompts; the statistics are the same"),
        "filter_overlong_prompts": to("data.filter_overlong_prompts"),
        "filter_overlong_prompts_workers": SPEED,
        "truncation": to("data.truncation", convert=lambda value: unquoted(value)),
        "trust_remote_code": accepted("`model.trust_remote_code` holds for the tokenizer too"),
        "custom_cls.path": to("data.custom_cls.path", convert=path, note="docs/data.md has the class's protocol"),
        "custom_cls.name": to("data.custom_cls.name"),
        "sampler.class_path": to("data.sampler.class_path", convert=path, note="docs/data.md has the class's protocol"),
        "sampler.class_name": to("data.sampler.class_name"),
        "datagen.path": only(["null"], "a class that makes prompts is `data.sampler`'s or `data.custom_cls`'s"),
        "datagen.name": accepted("used by veRL with `datagen.path` alone, which is refused"),
        "apply_chat_template_kwargs": entries("data.apply_chat_template_kwargs"),
    }.items()
}


def _resume(value: str, line: Line) -> list[str]:
    mode = unquoted(value)
    return [f"trainer.resume_mode={'path' if mode == 'resume_path' else mode}"]


def _resume_from(value: str, line: Line) -> list[str]:
    given = line.text("trainer.resume_mode", "auto") in ("resume_path", "path")
    return [f"trainer.resume_from_path={path(value)}"] if given and not is_null(value) else []


def _keep_newest(value: str, line: Line) -> list[str]:
    return ["trainer.max_ckpt_to_keep=1"] if same(value) == "true" else []


def _device(value: str, line: Line) -> list[str]:
    if unquoted(value) not in ("cuda", "cpu", "auto"):
        raise FlagError("must be cuda or cpu")
    return [f"device={unquoted(value)}"]


_KEPT = accepted("a checkpoint holds the policy and the critic; `trainer.max_ckpt_to_keep` holds for both")
_LOGGED = accepted("logs alone; docs/metrics.md has what is written")
_SHOWN = to("trainer.log_samples", note="of training steps too")
_KEPT_SAMPLES = accepted("all responses are kept in `samples/` of the run's folder (docs/samples.md)")

TRAINER_OPTIONS = {
    f"trainer.{name}": option
    for name, option in {
        "balance_batch": SPEED,
        "total_epochs": to("trainer.total_epochs"),
        "total_training_steps": to(
            "trainer.total_training_steps", convert=count_or_zero, note="null: 0, `trainer.total_epochs` alone counts"
        ),
        "project_name": to("trainer.project_name"),
        "experiment_name": to("trainer.experiment_name"),
        "logger": to("trainer.logger", convert=names),
        "log_val_generations": _SHOWN,
        "val_generations_to_log_to_wandb": _SHOWN,
        "dump_high_diff_tokens": _LOGGED,
        "dump_high_diff_dir": _LOGGED,
        "rollout_data_dir": _KEPT_SAMPLES,
        "validation_data_dir": _KEPT_SAMPLES,
        "nnodes": to("trainer.nnodes"),
        "n_gpus_per_node": to("trainer.n_gpus_per_node"),
        "save_freq": to("trainer.save_freq", convert=frequency, note="0, null and false are -1, never"),
        "esi_redundant_time": accepted("an instance's expiry is not known; `trainer.save_freq` decides"),
        "resume_mode": by("`trainer.resume_mode`; `resume_path` is `path`", _resume),
        "resume_from_path": by("`trainer.resume_from_path`, with `resume_mode=resume_path`", _resume_from),
        "val_before_train": to("trainer.val_before_train"),
        "val_only": to("trainer.val_only"),
        "test_freq": to("trainer.test_freq", convert=frequency, note="0, null and false are -1, never"),
        "critic_warmup": by(
            "`trainer.critic_warmup`: one less, as veRL's policy already learns in the step of that number",
            lambda value, line: [f"trainer.critic_warmup={max(0, line.number('trainer.critic_warmup', 0) - 1)}"],
        ),
        "default_hdfs_dir": only(["null"], "checkpoints are written to a folder", "set trainer.default_local_dir"),
        "del_local_ckpt_after_load": only(["false"], "a checkpoint that a run started from is kept"),
        "default_local_dir": to("trainer.default_local_dir", convert=path),
        "max_actor_ckpt_to_keep": to("trainer.max_ckpt_to_keep", convert=count_or_zero, note="null: 0, all"),
        "max_critic_ckpt_to_keep": _KEPT,
        "remove_previous_ckpt_in_save": by("true: `trainer.max_ckpt_to_keep=1` (an earlier name)", _keep_newest),
        "ray_wait_register_center_timeout": accepted("workers meet without a register; results are the same"),
        "device": by("`device`; `npu` is refused", _device),
        "use_legacy_worker_impl": accepted("which of veRL's workers trains; there is one here"),
    }.items()
}

SYSTEM_OPTIONS: dict[str, Option] = {
    "actor_rollout_ref.hybrid_engine": only(["true"], "the workers that train also sample"),
    "model_engine": only(["dp"], "models are sharded by FSDP2 (a later name)", "Megatron needs veRL"),
    "actor_rollout_ref.nccl_timeout": to("trainer.nccl_timeout_s"),
    "global_profiler._target_": CLASS,
    "global_profiler.*": PROFILER,
    "async_training.*": refused(NOT_SUPPORTED["async_training"]),
    "transfer_queue.*": accepted("how batches travel; results are the same"),
    "ray_kwargs.ray_init.runtime_env.*": refused(
        "workers have the environment of the shell that starts training, or Ray; set variables and packages there"
    ),
    "ray_kwargs.*": accepted("how Ray starts; results are the same"),
    "ray_init.*": accepted("how Ray starts; results are the same (an earlier name)"),
}
