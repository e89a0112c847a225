"""What becomes of options that veRL's models share: optimizer, sharding, checkpoints, the model itself."""

from dataclasses import replace

from verl.cli.values import FlagError, note
from verl.cli.verl_conversions import (
    Line,
    Option,
    accepted,
    by,
    choices,
    elements,
    entries,
    is_null,
    names,
    only,
    path,
    refused,
    same,
    to,
    unquoted,
)

ACTOR, REF, MODEL = (f"actor_rollout_ref.{group}" for group in ("actor", "ref", "model"))

CLASS = accepted("the name of one of veRL's own classes")
PROFILER = accepted("profiling never changes results; `trainer.profile_steps` writes traces")
SPEED = accepted("speed only; results are the same")
MEMORY = accepted("memory and speed only; results are the same")
SEED = accepted("`seed` fixes every random choice")
SHARDING = only(
    ["fsdp", "fsdp2"], "models are sharded by FSDP2, whose results are those of FSDP", "Megatron needs veRL"
)
DTYPE = choices({"fp32": "float32", "bf16": "bfloat16"})
NO_SHUFFLE = only(["false"], "mini-batches are taken in the batch's order, which `data.shuffle` makes random")
NO_LIBRARY = only(
    ["null"], "code outside of the model's folder is not imported", "import it in a `sitecustomize` module"
)
SAME_SIZE = accepted("is the number of responses per prompt, `rollout.n`")
ULYSSES = "ulysses_sequence_parallel_size"


def per_gpu(option: str, ulysses: str) -> Option:
    """A deprecated micro-batch size over all workers."""

    def translate(value: str, line: Line) -> list[str]:
        if is_null(value):
            return []
        groups = max(1, line.workers // line.number(ulysses, 1))
        try:
            size = int(unquoted(value))
        except ValueError:
            raise FlagError("must be a whole number") from None
        return [f"{option}={max(1, size // groups)}"]

    return by(
        f"`{option}`: the value divided by the number of workers that do not share a sequence, at least 1", translate
    )


def unless_null(option: str) -> Option:
    """An option whose null leaves ours as it is."""
    return by(f"`{option}`", lambda value, _: [] if is_null(value) else [f"{option}={same(value)}"])


def optim_options(prefix: str, ours: str) -> dict[str, Option]:
    """One model's optimizer."""
    group = prefix.removesuffix(".optim")
    steps = f"{prefix}.lr_warmup_steps"

    def warmup(value: str, line: Line) -> list[str]:
        count = line.number(steps, -1)
        if count <= 0:
            return []
        batch = line.number("data.train_batch_size", 1024)
        mini = line.number(f"{ACTOR}.ppo_mini_batch_size", 256)
        epochs = line.number(f"{ACTOR}.ppo_epochs", 1)
        mini = line.number(f"{group}.ppo_mini_batch_size", mini)
        epochs = line.number(f"{group}.ppo_epochs", epochs)
        return [f"{ours}.lr_warmup_steps={count * epochs * max(1, batch // mini)}"]

    def ratio(value: str, line: Line) -> list[str]:
        off = is_null(value) or unquoted(value) in ("0", "0.0")
        if off or line.number(steps, -1) >= 0:
            return []
        return [f"{ours}.lr_warmup_steps=-1", f"{ours}.lr_warmup_steps_ratio={value}"]

    schedule = choices({"null": "constant"})
    table = {
        "_target_": CLASS,
        "optimizer": only(["AdamW"], "the optimizer is AdamW"),
        "optimizer_impl": only(["torch.optim"], "the optimizer is torch's AdamW"),
        "lr": to(f"{ours}.lr"),
        "lr_warmup_steps_ratio": by(f"`{ours}.lr_warmup_steps_ratio`, unless `lr_warmup_steps` comes first", ratio),
        "total_training_steps": accepted("schedules end with the run; veRL writes its steps over it"),
        "weight_decay": to(f"{ours}.weight_decay"),
        "lr_warmup_steps": by(
            f"`{ours}.lr_warmup_steps`: the value times the optimizer steps of a training step, which veRL counts; -1: "
            "`lr_warmup_steps_ratio` decides",
            warmup,
        ),
        "betas": to(f"{ours}.betas", convert=lambda value: f"[{','.join(elements(value))}]"),
        "clip_grad": by(
            f"`{ours}.grad_clip`, unless `{group}.grad_clip` is given",
            lambda value, line: [] if f"{group}.grad_clip" in line.values else [f"{ours}.grad_clip={same(value)}"],
        ),
        "min_lr_ratio": by(
            f"`{ours}.min_lr_ratio`; null: 0",
            lambda value, _: [f"{ours}.min_lr_ratio={'0.0' if is_null(value) else value}"],
        ),
        "num_cycles": only(["0.5"], "the cosine decays once"),
        "lr_scheduler_type": by(
            f"`{ours}.lr_scheduler_type`, unless `warmup_style` is given",
            lambda value, line: (
                [f"{ours}.lr_scheduler_type={schedule(value)}"] if line.text(f"{prefix}.warmup_style") == "null" else []
            ),
        ),
        "warmup_style": unless_null(f"{ours}.lr_scheduler_type"),
        "override_optimizer_config": only(["null", "{}"], "set the optimizer's own options", f"such as `{ours}.eps`"),
    }
    return {f"{prefix}.{name}": option for name, option in table.items()}


def _master_weights(value: str, line: Line) -> list[str]:
    name = unquoted(value)
    if name in ("bf16", "bfloat16"):
        note("model_dtype=bf16: master weights stay float32, unlike in veRL; fsdp_config.dtype sets the products'")
    elif name not in ("fp32", "float32"):
        raise FlagError("master weights are always float32; fsdp_config.dtype sets the precision of products")
    return []


def fsdp_options(prefix: str, fsdp: str, dtype: str, ulysses: str) -> dict[str, Option]:
    """How one model is sharded; ``fsdp``, ``dtype`` and ``ulysses`` are our options, empty where there is none."""
    offload = f"{fsdp}.param_offload" if fsdp else ""

    def offload_all(value: str, line: Line) -> list[str]:
        options = [offload, f"{fsdp}.optimizer_offload"]
        return [f"{option}=true" for option in options] if same(value) == "true" else []

    policy = "as the policy"
    table = {
        "_target_": CLASS,
        "wrap_policy.*": MEMORY,
        "param_offload": to(offload) if fsdp else to("ref.param_offload"),
        "grad_offload": accepted("gradients live from a backward pass to its step (an earlier option)"),
        "optimizer_offload": to(f"{fsdp}.optimizer_offload") if fsdp else accepted("the reference has no optimizer"),
        "offload_policy": by(f"true: `{offload}` and `{fsdp}.optimizer_offload`", offload_all) if fsdp else MEMORY,
        "reshard_after_forward": MEMORY,
        "fsdp_size": sharding_size(f"{fsdp}.fsdp_size") if fsdp else accepted(f"the reference is sharded {policy} is"),
        "forward_prefetch": SPEED,
        "model_dtype": by(
            "nothing: master weights are float32, whose updates bfloat16 would round, and a note says so beside "
            "`bf16`; `fsdp_config.dtype` sets the precision of products. Others are refused",
            _master_weights,
        ),
        "use_orig_params": accepted("FSDP2 always keeps the original parameters"),
        "seed": SEED,
        "full_determinism": only(
            ["false"], "kernels are not forced to be deterministic", "`seed` fixes every random choice"
        ),
        ULYSSES: unless_one(ulysses) if ulysses else accepted(f"the reference splits sequences {policy} does"),
        "entropy_from_logits_with_chunking": accepted(
            "entropies are always computed in chunks, `model.logits_chunk_size`"
        ),
        "use_torch_compile": SPEED,
        "entropy_checkpointing": MEMORY,
        "forward_only": accepted("the model's role decides whether it learns"),
        "strategy": SHARDING,
        "dtype": to(dtype, convert=DTYPE) if dtype else accepted(f"the reference computes {policy} does"),
        "mixed_precision.param_dtype": to(dtype, convert=DTYPE) if dtype else accepted(f"computes {policy} does"),
        "mixed_precision.reduce_dtype": only(["fp32", "float32"], "gradients are summed in float32"),
        "mixed_precision.buffer_dtype": only(["fp32", "float32"], "buffers are float32"),
        "qat.*": refused("training for quantized weights is not supported; leave it out"),
    }
    return {f"{prefix}.{name}": option for name, option in table.items()}


def sharding_size(option: str) -> Option:
    """Workers that share one copy of a model."""

    def translate(value: str, line: Line) -> list[str]:
        text = unquoted(value)
        whole = text.startswith("-") or (text.isdigit() and int(text) > line.workers)
        return [f"{option}={-1 if whole else same(value)}"]

    return by(f"`{option}`; -1, all workers share one copy, above the number of workers", translate)


def unless_one(option: str) -> Option:
    """A second place of an option, whose default 1 must not undo the first."""
    return by(f"`{option}`, if it is above 1", lambda value, _: [] if value == "1" else [f"{option}={same(value)}"])


CHECKPOINT_PARTS = {"model", "optimizer", "extra", "hf_model"}


def checkpoint_options(prefix: str, of_policy: bool) -> dict[str, Option]:
    """What the checkpoints of one model hold; ours hold the policy and the critic together."""

    def contents(value: str, line: Line) -> list[str]:
        parts = set(elements(value))
        if parts - CHECKPOINT_PARTS:
            raise FlagError(f"must name some of {', '.join(sorted(CHECKPOINT_PARTS))}")
        return [f"trainer.save_hf_model={str('hf_model' in parts).lower()}"] if of_policy else []

    both = "`trainer.async_save` and `trainer.save_hf_model` hold for the policy and the critic"
    whole = "checkpoints hold whatever a run needs to resume"
    saved = (
        by(f"`trainer.save_hf_model`: whether `hf_model` is among them; {whole}", contents)
        if of_policy
        else accepted(f"{whole}; {both}")
    )
    table = {
        "_target_": CLASS,
        "save_contents": saved,
        "contents": replace(saved, meaning=f"{saved.meaning} (an earlier name)"),
        "load_contents": accepted(f"{whole}, and all of it is read"),
        "async_save": to("trainer.async_save") if of_policy else accepted(both),
    }
    return {f"{prefix}.{name}": option for name, option in table.items()}


def alpha_of(option: str) -> Option:
    """The scale of adapters, which veRL's commands without any set to 0."""
    return by(f"`{option}`; 0 is left out", lambda value, _: [] if value in ("0", "0.0") else [f"{option}={value}"])


def model_options(prefix: str, ours: str) -> dict[str, Option]:
    """One trained model: the policy or the critic."""
    one_folder = "tokenizer, configuration and weights are read from one folder"
    table = {
        "_target_": CLASS,
        "path": to(f"{ours}.path", convert=path),
        "hf_config_path": only(["null"], one_folder, "put `config.json` there"),
        "use_shm": SPEED,
        "trust_remote_code": to(f"{ours}.trust_remote_code"),
        "external_lib": NO_LIBRARY,
        "override_config.attn_implementation": to(f"{ours}.attn_implementation"),
        "override_config": entries(f"{ours}.override_config"),
        "enable_gradient_checkpointing": to(f"{ours}.gradient_checkpointing"),
        "enable_activation_offload": MEMORY,
        "use_remove_padding": to(f"{ours}.use_remove_padding"),
        "lora_rank": to(f"{ours}.lora.rank"),
        "lora_alpha": alpha_of(f"{ours}.lora.alpha"),
        "target_modules": to(f"{ours}.lora.target_modules", convert=names),
        "use_liger": to(f"{ours}.use_liger"),
        "use_fused_kernels": accepted("logits are computed in chunks, `model.logits_chunk_size`; results are the same"),
        "fused_kernel_options.*": SPEED,
        "tiled_mlp.*": MEMORY,
    }
    return {f"{prefix}.{name}": option for name, option in table.items()}
