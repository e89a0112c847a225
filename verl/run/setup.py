"""Sets up a training run: loads and checks everything before Ray starts."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase

from verl.cluster.start import resolve_device
from verl.config.checks import join_source, require
from verl.config.data import DataConfig
from verl.config.errors import ConfigError, Mistakes
from verl.config.judge import JUDGE
from verl.config.paths import SHIPPED
from verl.config.ppo import PPOConfig
from verl.config.rewards import RewardScoreConfig, summands
from verl.config.teacher import path_option
from verl.data.prompt_record import Begin, PromptRecord
from verl.data.prompts import PromptDataset, train_loader, val_batches
from verl.data.teacher_prompts import TeacherPrompts
from verl.data.templates import check_template, find_template, render_untrusted, stop_strings
from verl.method.calls import MethodCalls
from verl.models.checks import check_length, check_model, check_sequence_fits, check_value_architecture
from verl.models.hub import fetch_model
from verl.models.info import ModelInfo, check_weights, override_notes, resolve_layers
from verl.models.tokenizer import check_embeds_tokens, check_reads_tokens, check_reward_model_template, load_tokenizer
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.token_metrics import check_token_metrics
from verl.rewards import use_custom_functions
from verl.rewards.pool import VerifierPool
from verl.rewards.registry import find_scorer, judge_job
from verl.rollout.engines import check_engine_model, check_head_size, end_tokens
from verl.rollout.environments.conversations import ConversationSetup, check_conversations, with_tools
from verl.rollout.environments.pool import beginning
from verl.run.teacher_server import MAX_TEXTS, TeacherServer
from verl.run.tracker_backends import check_trackers
from verl.run.warnings import form_warnings, start_warnings
from verl.utils.process_pool import KillablePool
from verl.utils.user_code import kl_estimator
from verl.workers.policy_loss import CustomLoss, check_policy_loss

FAILURES = ("timeout", "memory", "crash")
"""Verdict reasons for functions that exceeded their limits or crashed."""


class TrainingSetup:
    """Data, tokenizers and user code of a run, with all checks that are possible before Ray starts.

    Raises ``ConfigError`` if the config does not fit the data or the machine, or custom code cannot be used.

    Args:
        checks: Additional checks by the trainer, which raise ``ConfigError`` if it does not support the config.
    """

    def __init__(self, config: PPOConfig, checks: Sequence[Callable[[PPOConfig], object]] = ()) -> None:
        data, trainer, rewards = config.data, config.trainer, config.reward_score
        self.config = config
        # 1. The machine, trackers and custom reward functions.
        check_trackers(trainer.logger)
        self.device_type = resolve_device(config.device, *trainer.place)
        use_custom_functions(rewards.paths_of_custom_functions(), rewards.function_kwargs)
        # 2. Models and tokenizers. Check a model's config.json before loading the tokenizer, which also reads it.
        for prefix, model in config.models.items():
            fetch_model(model.path, path_option(prefix))
        for model in config.models.values():
            ModelInfo.of(model)
        policy = config.model
        self.tokenizer = load_tokenizer(policy.path, policy.trust_remote_code, needs_chat_template=False)
        check_template(data.template, self.tokenizer, "data.template")
        fix = "the answer is what a program returns, which evaluations alone run; set it to another"
        require(find_template(data.template).python != "solution", "data.template", data.template, fix)
        # 3. Conversations, data, policy loss and models, reporting all mistakes together.
        data = replace(data, apply_chat_template_kwargs=self.chat_arguments)
        mistakes = Mistakes()
        scored, begin = config.needs_verdicts, None
        with ExitStack() as stack:
            with mistakes.collected():
                arguments = config.data.apply_chat_template_kwargs
                check_conversations(config.rollout.multi_turn, self.tokenizer, data.template, arguments)
                begin = stack.enter_context(beginning(config.rollout.multi_turn))
            with mistakes.collected():
                draw = (data.train_max_samples, config.seed, scored, begin)
                self.train_set = PromptDataset(data.train_files, self.tokenizer, data, *draw)
            with mistakes.collected():
                val_set = self._validation_set(data, begin) if data.val_files else None
        self.reward_tokenizer = self._reward_tokenizer() if config.uses_reward_model and not mistakes.lines else None
        """Tokenizer of the reward model, or None if there is no reward model."""
        self.judge_tokenizer: PreTrainedTokenizerBase | None = None
        """Tokenizer of a judge model that is part of the run, or None."""
        with mistakes.collected():
            self.judge_tokenizer = judge_tokenizer(config, self.tokenizer, self.device_type)
        with mistakes.collected():
            self.loss = CustomLoss(config.actor)
            check_policy_loss(config, self.loss)
        with mistakes.collected():
            check_models(config, self.tokenizer, self.device_type)
        mistakes.raise_all()
        # 4. The method, and the number of steps, which depends on how many candidates the method reads per prompt.
        self.steps_per_epoch = self._steps_per_epoch(1)
        self.steps = trainer.num_steps(self.steps_per_epoch)
        """Number of steps of the whole run."""
        self.method = self.new_method()
        """Method instance used only for checks. Each attempt creates a new instance."""
        if self.method.candidates_per_prompt > 1:
            self.steps_per_epoch = self._steps_per_epoch(self.method.candidates_per_prompt)
            self.steps = self.method.method.total_steps = trainer.num_steps(self.steps_per_epoch)
        notes = [f"training: {line}" for line in self.train_set.notes]
        self.held_out: list[list[PromptRecord]] = []
        """Validation prompts in batches."""
        if val_set is not None:
            notes += [f"validation: {line}" for line in val_set.notes]
            self.held_out = val_batches(val_set, data, config.seed)
        # 5. Rewards and the learning signal.
        held_out = [record for batch in self.held_out for record in batch]
        if scored:
            notes += try_reward_functions(rewards, [*self.train_set.records, *held_out])
            notes += form_warnings(rewards.mode, self.train_set.records, self.tokenizer)
        self.calculator = RepresentationMetricsCalculator(config.calculator) if config.calculator.enable else None
        """Metrics calculator, or None if rank metrics are disabled."""
        for check in checks:
            check(config)
        check_token_metrics(config.calculator.token_metrics)
        kl_estimator(config.actor.kl_loss_type, "actor.kl_loss_type", config.actor.kl_loss_type_kwargs)
        check_teacher_sources(config, [record.data_source for record in self.train_set.records])
        texts = [str(record.messages[-1]["content"] or "") for record in self.train_set.records[:MAX_TEXTS]]
        teacher, servers = config.teacher, config.teacher.servers.items()
        top_k = teacher.top_k if teacher.is_exact else 0
        self.teacher_servers = [TeacherServer(o, self.tokenizer, texts, top_k, name) for name, o in servers]
        """Clients of the teachers at addresses."""
        self.teacher_prompts = self._teacher_prompts()
        """Prompts for the teacher, or None if the teacher uses the policy's prompts."""
        # 6. Steps.
        check_profile_steps(trainer.profile_steps, self.steps)
        if trainer.critic_warmup >= self.steps:
            raise ConfigError(
                f"trainer.critic_warmup={trainer.critic_warmup}: the run has {self.steps} steps, which leaves none to "
                "train the policy; lower it"
            )
        check_method_and_loss(config, self.method, self.loss)
        notes += [f"training: {self.method.note}"] if self.method.note else []
        notes += override_notes(policy)
        notes += [server.note for server in self.teacher_servers if server.note]
        self.warnings = notes + start_warnings(config, self.method)

    def _validation_set(self, data: DataConfig, begin: Begin | None) -> PromptDataset:
        try:
            return PromptDataset(data.val_files, self.tokenizer, data, scored=self.config.needs_verdicts, begin=begin)
        except ConfigError as error:
            embedded = (SHIPPED / "data" / "arithmetic").resolve()
            validates, trains = (
                any(embedded in Path(name).resolve().parents for name in names)
                for names in (data.val_files, data.train_files)
            )
            if trains or not validates:
                raise
            fix = f"name your own, or set data.val_files=[] ({error})"
            raise ConfigError(f"data.val_files={data.val_files}: are still the embedded task's; {fix}") from None

    def _steps_per_epoch(self, candidates: int) -> int:
        return len(train_loader(self.train_set, self.config.data, self.config.seed, candidates))

    @property
    def chat_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template, including the tool schemas."""
        return with_tools(self.config.data.apply_chat_template_kwargs, self.config.rollout.multi_turn)

    def conversations(self, pool: KillablePool, say: Callable[[str], None]) -> ConversationSetup:
        """Return the setup of conversations with the environments or agents in ``pool``."""
        data, options = self.config.data, self.config.rollout.multi_turn
        limits, texts = (data.max_prompt_length, data.max_response_length), (self.chat_arguments, self.stop_strings)
        return ConversationSetup(options, *limits, self.tokenizer, *texts, pool, say, data.template)

    @property
    def stop_strings(self) -> list[str]:
        """Strings that end a response."""
        return [*self.config.rollout.stop, *stop_strings(self.config.data.template, self.tokenizer)]

    def new_method(self) -> MethodCalls:
        """Create the method in its initial state, without state from any failed attempt."""
        return MethodCalls(self.config, self.tokenizer, self.train_set.records, self.steps)

    def new_loader(self) -> StatefulDataLoader:
        """Return a loader of training prompts that starts with the first batch."""
        config, candidates = self.config, self.method.candidates_per_prompt
        return train_loader(self.train_set, config.data, config.seed, candidates)

    def _teacher_prompts(self) -> TeacherPrompts | None:
        config, teacher = self.config, self.config.teacher
        if not config.uses_teacher or teacher.prompt is None:
            return None
        data = replace(config.data, apply_chat_template_kwargs=self.chat_arguments)
        models = [config.model] if teacher.is_policy else teacher.models.values()
        limits = [server.limit for server in self.teacher_servers] or [ModelInfo.of(m).max_length for m in models]
        limit = min((limit for limit in limits if limit is not None), default=None)
        prompts = TeacherPrompts(teacher.prompt, data, self.tokenizer, limit)
        prompts.try_on(self.train_set.records[0], config.rollout.n)  # fail before Ray starts
        return prompts

    def _reward_tokenizer(self) -> PreTrainedTokenizerBase:
        judge = self.config.reward_model.model
        tokenizer = load_tokenizer(judge.path, judge.trust_remote_code, "reward_model.model.path")
        chats = [record.messages for record in self.train_set.records]
        check_reward_model_template(chats, tokenizer, f"reward_model.model.path={judge.path!r}")
        return tokenizer


def judge_tokenizer(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, device_type: str
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a judge model that is part of the run, or None.

    Raises ``ConfigError`` if the model cannot be used as a judge.
    """
    judge, field = config.reward_score.judge, "reward_score.judge.model.path"
    path = judge.model.path
    if not judge.enable or path is None:
        return None
    info = ModelInfo.of(config.model)
    if judge.is_frozen:
        fetch_model(path, field)
        info = ModelInfo.read(path, judge.model.trust_remote_code)
        check_weights(info, f"{field}={path!r}")
        check_head_size(info, device_type, f"name another model as {field}")
        tokenizer = load_tokenizer(path, judge.model.trust_remote_code, field)
    if tokenizer.chat_template is None:
        raise ConfigError(f"{field}={path!r}: its tokenizer has no chat template to judge by; name another model")
    try:
        render_untrusted("", tokenizer)
    except ConfigError as error:
        raise ConfigError(f"{field}={path!r}: {error}") from error
    if info.max_length is not None and judge.max_length > info.max_length:
        raise ConfigError(
            f"reward_score.judge.model.max_prompt_length={judge.model.max_prompt_length}: with "
            f"reward_score.judge.max_tokens={judge.max_tokens} more than the {info.max_length} tokens that "
            f"{field}={path!r} takes; lower it"
        )
    return tokenizer


def try_reward_functions(config: RewardScoreConfig, records: Sequence[PromptRecord]) -> list[str]:
    """Call each data source's custom function on the source's first record, as in training.

    Each function scores an empty response and the ground truth. An external pairwise judge compares these two. Returns
    a warning for each call that crashed or exceeded a limit. Raises ``ConfigError`` if a function raises an error or
    returns no score, or if no record has its data source.
    """
    custom = config.paths_of_custom_functions()
    if not custom:
        return []
    firsts: dict[str, PromptRecord] = {}
    for record in records:
        firsts.setdefault(record.data_source, record)
    if unused := sorted(custom.keys() - firsts.keys() - {"*"}):
        field, entry = "custom_functions", join_source(unused[0], custom[unused[0]])
        if unused[0] in config.judge.data_sources:
            field, entry = "judge.data_sources", unused[0]
        raise ConfigError(
            f"reward_score.{field}={entry!r}: no prompt has the data_source {unused[0]!r}; the data have "
            f"{', '.join(sorted(firsts)):.500}"
        )
    scored = [record for source, record in firsts.items() if source in custom or "*" in custom]
    tries = [(record, text) for record in scored for text in ("", str(record.ground_truth))]
    with VerifierPool(replace(config, num_workers=1)) as verifiers:
        verdicts = verifiers.score_batch(
            [record.data_source for record, _ in tries],
            [text for _, text in tries],
            [record.ground_truth for record, _ in tries],
            [record.extra_info for record, _ in tries],
        )
        if config.judge.waits and config.judge.base_url is not None:
            paths = [find_scorer(record.data_source, custom).path for record in scored]
            judged = [JUDGE in [part for _, part in summands(path)] for path in paths]
            first = scored[judged.index(True)]
            given = (first.data_source, "", first.ground_truth, first.extra_info)
            verifiers.submit_judgements([judge_job(*given, str(first.ground_truth))]).result()
    return [
        f"reward_score.custom_functions: the function of data_source={record.data_source!r} scored the response "
        f"{text!r:.100} 0 for {verdict.reason}, tried on the first record"
        for (record, text), verdict in zip(tries, verdicts, strict=True)
        if verdict.reason in FAILURES
    ]


def check_teacher_sources(config: PPOConfig, sources: Sequence[str]) -> None:
    """Check ``teacher.by_source`` against the data sources of the training prompts.

    Raises ``ConfigError`` if a source has no teacher, or a teacher is for a source without prompts.
    """
    teacher, known = config.teacher, sorted({*sources})
    if not teacher.by_source:
        return
    field = f"teacher.by_source={teacher.by_source}"
    if unused := [source for source in teacher.sources if source not in known]:
        raise ConfigError(
            f"{field}: no prompt has the data_source {unused[0]!r}; the data have {', '.join(known):.500}"
        )
    if untaught := [source for source in known if teacher.index_of(source) is None]:
        fix = "name teachers for them, or one for all other sources as teacher.model.path or teacher.server.address"
        raise ConfigError(f"{field}: the data_source {', '.join(map(repr, untaught)):.500} has no teacher; {fix}")


def check_method_and_loss(config: PPOConfig, method: MethodCalls, loss: CustomLoss) -> None:
    """Raise ``ConfigError`` if the policy loss does not support batches composed by the method."""
    needs = loss.needs
    if not method.overrides("learn_from"):
        return
    where = f"{method.where}: overrides learn_from, but actor.policy_loss={config.actor.policy_loss!r}"
    if needs.old_statistics:
        raise ConfigError(f"{where} compares with the policy that sampled; choose another loss or method")
    if needs.whole_groups:
        raise ConfigError(f"{where} needs all responses to a prompt; choose another loss or method")


def check_models(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, device_type: str) -> None:
    """Raise ``ConfigError`` if a model is incompatible with its options, the tokenizer or the sequence lengths."""
    for prefix, model in config.models.items():
        field, longest = "data.max_prompt_length+data.max_response_length", config.max_sequence_length
        if prefix == "reward_model.model":
            field, longest = "reward_model.max_length", config.reward_model.max_length
        check_sequence_fits(field, longest, path_option(prefix), model)
        check_model(model, prefix, device_type)
        check_length(model, prefix, longest)
    if config.calculator.enable:
        resolve_layers(config.calculator.layers, ModelInfo.of(config.model).num_layers)
    if config.uses_reward_model:
        check_value_architecture(config.reward_model.model, "reward_model.model.path")
    if config.uses_critic:
        check_value_architecture(config.critic.model, "critic.model.path")
    check_engine_model(config, device_type)
    end_tokens(config, tokenizer)  # raises an error if a token is outside the vocabulary
    check_embeds_tokens(config.model, "model.path", tokenizer)
    for prefix, model in config.teacher.models.items():
        check_reads_tokens(model, path_option(prefix), tokenizer)
        if config.teacher.rank_metrics:
            resolve_layers(config.calculator.layers, ModelInfo.of(model).num_layers, prefix)
    if config.uses_critic and config.critic.model.path != config.model.path:
        check_reads_tokens(config.critic.model, "critic.model.path", tokenizer)


def check_profile_steps(steps: Sequence[int], total_steps: int) -> None:
    """Raise ``ConfigError`` if ``trainer.profile_steps`` contains a step after the end of the run."""
    late = [step for step in steps if step > total_steps]
    if late:
        raise ConfigError(f"trainer.profile_steps={list(steps)}: the run has {total_steps} steps; leave out {late}")
