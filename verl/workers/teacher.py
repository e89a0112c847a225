"""Loads and updates the teachers for on-policy distillation, and computes the teacher loss of the policy's update."""

import math
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerBase

from verl.algorithms.kl import kl_loss
from verl.batch import Batch
from verl.config.common import ModelConfig
from verl.config.ppo import PPOConfig
from verl.config.teacher import TeacherConfig
from verl.models.forward import Teacher, TopKTeacher
from verl.models.info import ModelInfo
from verl.models.offload import local_part, reshard
from verl.models.output_head import TeacherLoss
from verl.models.policy import Policy, copy_policy, scoring_batches
from verl.models.tokenizer import num_ids


def load_teachers(
    config: PPOConfig, mesh: DeviceMesh, policy: Policy, tokenizer: PreTrainedTokenizerBase
) -> list[Policy]:
    """Return the teachers that run in this worker: frozen models, the policy itself, or the start of its average.

    ``tokenizer`` is the policy's.
    """
    options = config.teacher
    if options.is_average:
        # Frozen weights would be rounded to the precision of the forward pass.
        return [copy_policy(policy, config, mesh, options.model.fsdp.param_offload, trainable=True)]
    if options.is_policy:
        return [policy]
    return [_load(config, model, mesh, tokenizer) for model in options.models.values()]


def _load(config: PPOConfig, model: ModelConfig, mesh: DeviceMesh, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """Load a frozen teacher.

    If padding makes the output heads of policy and teacher differ in size, the loss compares only the tokenizer's
    tokens, and the teacher's probabilities are normalised over these tokens.
    """
    rows = {ModelInfo.of(other).text_config.vocab_size for other in (config.model, model)}
    vocabulary = None if len(rows) == 1 else num_ids(tokenizer)
    scoring, temperature = scoring_batches(config.actor, model), config.rollout.temperature
    return Policy(model, mesh, scoring, temperature, trainable=False, vocabulary=vocabulary)


@torch.no_grad()
def update_average(average: Policy, policy: Policy, rate: float) -> None:
    """Set every weight of ``average`` to (1 - rate) * average + rate * policy, in float32."""
    with average.parameters.loaded(), policy.parameters.loaded():
        reshard(average.model)
        reshard(policy.model)
        for mean, current in zip(average.model.parameters(), policy.model.parameters(), strict=True):
            local_part(mean).lerp_(local_part(current), rate)


class UpdateTeacher:
    """Teacher loss in the policy's update, set by ``teacher.loss``.

    Losses over whole distributions read ``teachers`` in this worker: frozen models, a moving average, or the policy
    itself. Other losses read only columns of the batch. The column ``teacher`` contains indices into ``teachers``.

    Args:
        num_ids: Number of ids of the tokenizer, on which a server's most likely tokens are compared.
    """

    def __init__(self, options: TeacherConfig, teachers: Sequence[Policy], policy: Policy, num_ids: int) -> None:
        assert options.loss is not None, "a teacher without a loss is in the advantage"
        self.options, self.loss_name = options, options.loss
        self.teachers = teachers if options.runs_in_update else ()
        self.policy, self._num_ids = policy, num_ids
        self._reading, self._loaded = ExitStack(), -1
        """Context in which a teacher is on the device during an update, and the teacher's index or -1."""
        for teacher in self.teachers:
            if isinstance(teacher.model, FSDPModule) and teacher is not policy:
                # Each chunk of the output head needs the teacher's head, so gather it only once per update.
                teacher.model.set_reshard_after_forward(False, recurse=False)

    def inputs(self, micro: Batch) -> tuple[TeacherLoss, Teacher | TopKTeacher] | tuple[None, None]:
        """Return the loss and the teacher to pass to the policy's forward pass, or None for losses of sampled tokens.

        A teacher in this worker is loaded onto the device until :meth:`unload`. ``micro.tokens`` are on the CPU.
        """
        options = self.options
        if not options.is_exact:
            return None, None
        loss = TeacherLoss(self.loss_name, options.temperature, options.beta, options.top_k)
        if options.is_server:
            entries = torch.cat([micro.teacher_top_k_logprobs, micro.teacher_top_k_ids.float()], dim=1)
            return loss._replace(is_top_k=True, vocabulary=self._num_ids), TopKTeacher(entries)
        index = int(micro.teacher[0]) if "teacher" in micro else 0
        self._load(index)
        teacher = self.teachers[index]
        rows = micro.after(micro.teacher_prompts) if "teacher_prompts" in micro else micro.columns("tokens")
        if teacher.vocabulary is not None:
            rows.fill(tokens=rows.tokens.clamp(max=teacher.vocabulary - 1))
        return loss._replace(vocabulary=teacher.vocabulary), Teacher(teacher.forward, rows)

    def losses(self, micro: Batch, scored: Batch, logprobs: Tensor) -> Tensor:
        """Return the teacher loss of each token in nats, [B, R]. ``scored`` is the result of the forward pass."""
        if self.options.is_exact:
            loss = scored.padded("teacher_loss")
        else:
            loss = kl_loss(self.loss_name, logprobs, micro.padded("teacher_logprobs"))
        limit = self.options.loss_max_clamp or math.inf
        loss = loss.clamp(-limit, limit)
        return torch.where(micro.taught[:, None], loss, 0.0) if "taught" in micro else loss

    def unload(self) -> None:
        """Unload the teacher that is on the device, if any."""
        self._load(-1)

    def _load(self, index: int) -> None:
        """Load a teacher other than the policy onto the device, after unloading the previous one; -1 loads none."""
        if index == self._loaded:
            return
        self._reading.close()
        self._loaded = index
        if index >= 0 and (teacher := self.teachers[index]) is not self.policy:
            self._reading.enter_context(teacher.parameters.loaded())
            self._reading.callback(reshard, teacher.model)
