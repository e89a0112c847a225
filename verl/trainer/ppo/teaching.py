"""Scores a step's responses with the teachers and updates a teacher that averages the policy, in the driver."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl.batch import EPISODE, TEACHER_RANK, Batch
from verl.config.teacher import TeacherConfig
from verl.data.teacher_prompts import TeacherPrompts
from verl.run.teacher_server import TeacherServer, ask_servers
from verl.single_controller.roles import PolicyWorkers
from verl.trainer.logging.rollout_metrics import data_sources, metrics_by_source, teacher_metrics, with_prefix
from verl.trainer.logging.speed import PhaseTimer, Work


@dataclass(eq=False)
class Teaching:
    """The teachers of a run, which are in the policy's workers or on servers."""

    options: TeacherConfig
    prompts: TeacherPrompts | None
    """Prompts for the teachers, or None if they use the policy's prompts."""
    servers: Sequence[TeacherServer]
    """Clients of the teachers on servers; empty if they are in the workers."""
    policy: PolicyWorkers
    timer: PhaseTimer

    @property
    def reads_verdicts(self) -> bool:
        """Whether the teachers' prompts depend on the responses and their verdicts."""
        return self.prompts is not None and self.prompts.read_verdicts

    def score(self, batch: Batch) -> None:
        """Fill the teacher columns that the options require: prompts, log-probabilities and rank metrics.

        Raises:
            ConfigError: If the user's prompt function fails, or a sequence is too long for a teacher.
            MachineError: If a server does not answer.
        """
        options, rows = self.options, batch.columns("tokens", "source")
        with self.timer.phase("teacher"):
            if self.prompts is not None:
                rows = batch.after(self._fill_prompts(batch, self.prompts))
            if options.by_source:
                rows.fill(teacher=torch.tensor(options.indices_of(data_sources(batch))))
            if self.servers:
                batch.merge(ask_servers(self.servers, rows))
                return
            if options.runs_in_update and options.by_source:
                batch.fill(teacher=rows.teacher)
            if not options.scores_samples:
                return
            scored = self.policy.map_rows("compute_teacher_logprobs", rows)
            batch.fill(teacher_logprobs=scored.logprobs)
            batch.fill(EPISODE, **{n: getattr(scored, n) for n in scored.names if n.startswith(TEACHER_RANK)})
        self.timer.count("teacher", Work.of(rows.lengths))

    def _fill_prompts(self, batch: Batch, teacher_prompts: TeacherPrompts) -> list[list[int]]:
        """Return the teacher's prompt for each response, and fill the columns that the update needs.

        A response without such a prompt keeps the policy's prompt, and nothing is learned from the teacher.
        """
        found = teacher_prompts.of_batch(batch)
        prompts = [r.input_ids if p is None else p for p, r in zip(found, batch.records, strict=True)]
        if self.options.runs_in_update:
            batch.fill(teacher_prompts=prompts)
        if teacher_prompts.read_verdicts:
            batch.fill(taught=torch.tensor([prompt is not None for prompt in found]))
        return prompts

    def after_update(self, step: int) -> None:
        """Update a teacher that is a moving average of the policy, every ``teacher.update_freq`` steps."""
        options = self.options
        if options.is_average and step % options.update_freq == 0:
            self.policy.workers.run("update_teacher", options.update_rate)

    def metrics(self, batch: Batch, sources: Sequence[str]) -> dict[str, float]:
        """Return the metrics of policy and teacher (``teacher_metrics``), also for each of ``sources``."""
        of_source = metrics_by_source(data_sources(batch), sources, lambda rows: teacher_metrics(batch[rows]))
        return teacher_metrics(batch) | with_prefix("train", of_source)
