"""The message of each wrong option: a line names the overrides and how the message begins."""

import re

import pytest

from verl.config import ConfigError, PPOConfig, load_config
from verl.config.rewards import RewardManagerConfig

# Names, types and sizes; then the rules of single options, one for each kind of rule; then rules between options.
REFUSALS = """\
data.shufle=1 -> data.shufle: unknown key; did you mean data.shuffle?
rolout.n=3 -> rolout: unknown key; did you mean rollout?
rollout=nothing -> In 'ppo_trainer': Could not find 'rollout/nothing' Available options in 'rollout': vllm Config search
+data.shufle=1 -> data.shufle=1: unknown key; did you mean data.shuffle?
+rollout.val_kwargs.tempratur=1 -> rollout.val_kwargs.tempratur=1: unknown key; did you mean rollout.val_kwargs.temperat
rollout.n=??? -> rollout.n: has no value; set it in the YAML or on the command line
~rollout.n -> rollout.n: has no value; set it in the YAML or on the command line
rollout.n=${nowhere} -> rollout.n: Interpolation key 'nowhere' not found
seed=eight -> seed='eight': must be an integer, not str
seed=1.5 -> seed=1.5: must be an integer, not float
data.shuffle=1 -> data.shuffle=1: must be true or false, not int
data.truncation=1 -> data.truncation=1: must be text, not int
rollout.n=null -> rollout.n=None: must be an integer, not NoneType
actor.tis_cap=inf -> actor.tis_cap=inf: must be a finite number up to 3.4e+38 in size, as in float32
seed=-1 -> seed=-1: must be in [0, 4294967295]
actor.optim.lr=0 -> actor.optim.lr=0.0: must be in (0, 1]
actor.clip_ratio_c=0.5 -> actor.clip_ratio_c=0.5: must be above 1, or null
actor.optim.lr_warmup_steps_ratio=0.1 -> actor.optim.lr_warmup_steps_ratio=0.1: lr_warmup_steps=4 comes first; set lr_wa
trainer.test_freq=-2 -> trainer.test_freq=-2: must be -1 (never), 0 (only at the end) or greater
trainer.machines_timeout_s=0 -> trainer.machines_timeout_s=0.0: must be greater than 0, and at most 31536000 seconds, a
trainer.env=['MY_KEY=hush'] -> trainer.env='MY_KEY': names variables only, such as MY_CACHE or MY_*; set their values in
trainer.except_save=[5,0] -> trainer.except_save[1]=0: steps are counted from 1
data.val_sample_size=0 -> data.val_sample_size=0: must be -1 or at least 1
data.val_max_samples=5 -> data.val_max_samples: unknown key; did you mean data.val_sample_size?
data.train_weights=[1,2] -> data.train_weights=[1.0, 2.0]: data.train_files has 1 entries; name one weight for each
data.train_weights=[0] -> data.train_weights=[0.0]: needs a weight above 0, and a finite sum
data.train_weights=[-1] -> data.train_weights[0]=-1.0: must be at least 0
data.custom_cls.path=a.py -> data.custom_cls.name=None: path='a.py': set both path and name, or neither
data.sampler.class_name=A -> data.sampler.class_name='A': class_path=None: set both class_path and class_name, or neithe
rollout.top_p=0 -> rollout.top_p=0.0: must be in (0, 1]
calculator.metric_indices=[] -> calculator.metric_indices=[]: name at least one
calculator.metric_indices=[1,1] -> calculator.metric_indices=[1, 1]: name each once
calculator.metric_indices=[5] -> calculator.metric_indices=[5]: indices run from 0 to 4: ['Response Entropy 1', 'Effecti
actor.optim.lr=5 -> actor.optim.lr=5.0: must be in (0, 1]
actor.optim.betas=[1,2] -> actor.optim.betas=[1.0, 2.0]: needs two numbers in [0, 1), such as [0.9,0.999]
actor.optim.eps=1e-300 -> actor.optim.eps=1e-300: must be greater than 0 (1e-38, in float32)
actor.optim.weight_decay=1e6 -> actor.optim.weight_decay=1000000.0: must be at least 0, and times optim.lr=0.0002 below
actor.tis_cap=1e300 -> actor.tis_cap=1e+300: must be a finite number up to 3.4e+38 in size, as in float32
data.train_batch_size=5000000000 -> data.train_batch_size=5000000000: must be an integer up to 4294967295 in size
actor.clip_cov_lb=9 actor.clip_cov_ub=8 -> actor.clip_cov_lb=9.0: must be below actor.clip_cov_ub=8
rollout.stop_token_ids=[3,-1] -> rollout.stop_token_ids[1]=-1: tokens are numbered from 0
rollout.temperature=1e-9 -> rollout.temperature=1e-09: must be at least 0: 0 for greedy decoding, or from 0.01, the leas
rollout.repetition_penalty=1e-9 -> rollout.repetition_penalty=1e-09: must be greater than 0, from 0.01 to 100
reward_score.timeout_s=1e12 -> reward_score.timeout_s=1000000000000.0: must be greater than 0, and at most 31536000 seco
trainer.n_gpus_per_node=1000000000 -> trainer.n_gpus_per_node=1000000000: must be greater than 0 and at most 1024
max_response_length=5 -> max_response_length: unknown key; did you mean data.max_response_length?
rollout.max_response_length=5 -> rollout.max_response_length: unknown key; did you mean data.max_response_length?
optim.lr=1 -> optim: unknown key; did you mean actor.optim.lr or critic.optim.lr?
model.lora_rank=4 -> model.lora_rank: unknown key; did you mean model.lora.rank?
critic.optim={lrr:1} -> critic.optim.lrr: unknown key; did you mean critic.optim.lr?
trainer.logger={a:b} -> trainer.logger: must be a list, [a,b]
model=null -> model=null: must be one of llama3.2_3b, mistral_7b, qwen2.5_1.5b, qwen2.5_7b, tiny, verl
model=5 -> model=5: is a group of options; set one of model.path, model.override_config, model.param_dtype, model.logits
+model=5 -> model=5: is a group of options; set one of model.path, model.override_config, model.param_dtype, model.logit
++data=null -> data=null: must be one of arithmetic, simplerl, verl
experiment=5 -> experiment=5: must be one of aipo, brorl, clip_cov, confucius3, confucius3_entropy, dapo, drive, ead, gh
preset=[5] -> preset=[5]: must be one of embedded, paper, paper_4096, verl
model@critic.model=5 -> model@critic.model=5: must be one of llama3.2_3b, mistral_7b, qwen2.5_1.5b, qwen2.5_7b, tiny, ve
actor.optim=null -> actor.optim=None: must be a group of options: lr, betas, eps, weight_decay, lr_scheduler_type, lr_wa
algorithm.adv_estimator=grop -> algorithm.adv_estimator='grop': must be one of grpo, rloo, reinforce_plus_plus, reinforc
algorithm.kl_ctrl.type=adaptve -> algorithm.kl_ctrl.type='adaptve': must be one of fixed, adaptive; did you mean 'adapti
algorithm.filter_groups.metric=accuracy -> algorithm.filter_groups.metric='accuracy': must be one of acc, score, seq_rew
actor.policy_loss=ppo -> actor.policy_loss='ppo': must be one of ppo_clip, gspo, cispo, gmpo, gpg, sapo, clip_cov, kl_co
trainer.logger=[console,clearml] -> trainer.logger[1]='clearml': must be one of console, tensorboard, wandb, mlflow, swa
rollout.stop=['',a] -> rollout.stop[0]='': an empty string ends every response; leave it out
rollout.engine_kwargs.block_size=16 -> rollout.engine_kwargs.block_size: unknown key; a new entry of rollout.engine_kwar
+rollout.engine_kwargs.seed=3 -> rollout.engine_kwargs.seed=3: set seed; the workers of one engine must draw alike
+rollout.engine_kwargs.load_format=dummy -> rollout.engine_kwargs.load_format='dummy': engines get the policy's weights
+rollout.engine_kwargs.hf_overrides.a=1 -> rollout.engine_kwargs.hf_overrides={'a': 1}: set model.override_config, which
rollout.name=hf rollout.seeded=false -> rollout.seeded=False: rollout.name=hf draws from streams alone; set it to true
+actor_rollout_ref.rollout.multi_turn.enable=true -> actor_rollout_ref={'rollout': {'multi_turn': {'enable': True}}}: un
rollout.multi_turn.enable=true -> rollout.multi_turn.enable: unknown key; multi-turn rollout with tools is not supported
+rollout.multi_turn.tool_config_path=x -> rollout.multi_turn={'tool_config_path': 'x'}: unknown key; multi-turn rollout
rollout.mode=async -> rollout.mode: unknown key; asynchronous rollout is not supported: all responses of a step are samp
+rollout.agent.num_workers=8 -> rollout.agent={'num_workers': 8}: unknown key; rollout by agents is not supported: a res
actor_rollout_ref.rollout.n=8 -> actor_rollout_ref.rollout.n: unknown key; its groups stand alone here: model, actor, re
actor.kl_loss_type=k4 -> actor.kl_loss_type='k4': must be one of kl, k1, abs, mse, k2, low_var_kl, k3, kl+, k1+, abs+, m
algorithm.adv_estimator=mine.py: -> algorithm.adv_estimator='mine.py:': an import path is module:attribute or file.py:at
trainer.method=square -> trainer.method='square': an import path is module:attribute or file.py:attribute
++algorithm.adv_estimator_kwargs.a=1 -> algorithm.adv_estimator_kwargs={'a': 1}: are for your own adv_estimator=module:a
calculator.own_metrics=[m:f,n.py:f] -> calculator.own_metrics=['m:f', 'n.py:f']: name each once; your own are known by t
calculator.own_metrics=[rank] -> calculator.own_metrics[0]='rank': an import path is module:attribute or file.py:attribu
algorithm=grpo_passk rollout.n=1 -> rollout.n=1: grpo_passk compares the two best responses to a prompt; set rollout.n>=
algorithm.use_pf_ppo=true -> algorithm.use_pf_ppo=True: belongs to algorithm.adv_estimator=gae; set it to false
actor.bypass_mode=true actor.tis_level=token -> actor.tis_level='token': with actor.bypass_mode the ratio of ppo_clip is
algorithm=gae critic.model.lora_adapter_path=a -> critic.model.lora_adapter_path='a': only the policy starts from an ada
rollout.val_kwargs.n=2 -> rollout.val_kwargs.n=2: greedy decoding (temperature=0) gives one response; set n=1
rollout.max_num_batched_tokens=8 -> rollout.max_num_batched_tokens=8: must be at least rollout.max_num_seqs=256
data.train_batch_size=20 -> actor.ppo_mini_batch_size=24: must be at most data.train_batch_size=20
algorithm=gae critic.ppo_mini_batch_size=50 -> critic.ppo_mini_batch_size=50: must be at most data.train_batch_size=48
calculator.enable=false -> calculator.enable=False: rank shaping needs rank metrics; set calculator.enable=true, or rewa
calculator.compute_diff=false -> reward_manager.indicator_names='Effective Rank diff 2': is not computed, but ['Effectiv
reward_manager.w_explore=[1] -> reward_manager.w_explore=[1.0]: needs one weight per indicator, 3: ['Effective Rank diff
actor.policy_loss=gspo actor.clip_ratio_c=3 -> actor.clip_ratio_c=3.0: gspo has no dual clip; set it to null
algorithm.kl_ctrl.type=adaptive -> algorithm.kl_ctrl.type='adaptive': adaptive control needs the KL divergence in the re
trainer.critic_warmup=1 -> trainer.critic_warmup=1: grpo has no critic; set it to 0
trainer.resume_mode=path -> trainer.resume_from_path=None: trainer.resume_mode=path needs a checkpoint; name its folder,
trainer.min_nnodes=2 -> trainer.min_nnodes=2: must be from 1 to trainer.nnodes=1, or null
trainer.detection_s=0.5 -> trainer.detection_s=0.5: must be in [1, 86400]
trainer.resume_from_path=a/b -> trainer.resume_from_path='a/b': is used only with trainer.resume_mode=path; set that too
trainer.val_only=true data.val_files=[] -> trainer.val_only=True: there are no validation prompts; set data.val_files
data.gen_batch_size=96 -> data.gen_batch_size=96: without algorithm.filter_groups a step samples data.train_batch_size=4
algorithm.filter_groups.enable=true algorithm=gae rollout.n=1 -> rollout.n=1: algorithm.filter_groups compares the respo
rollout.name=hf rollout.tensor_parallel_size=2 -> rollout.tensor_parallel_size=2: rollout.name=hf has no tensor parallel
model.fsdp.fsdp_size=0 -> model.fsdp.fsdp_size=0: must be null, -1 or at least 1
model.attn_implementation=flex -> model.attn_implementation='flex': must be one of sdpa, eager, flash_attention_2, flash
actor.clip_ratio_low=2 -> actor.clip_ratio_low=2.0: must be in (0, 1]; with gmpo it may be greater
++actor.policy_loss_kwargs.a=1 -> actor.policy_loss_kwargs={'a': 1}: are those of a policy loss of your own, and ppo_cli
data.train_weights=[1] data.shuffle=false -> data.train_weights=[1.0]: mixing draws prompts at random; set data.shuffle=
reward_score.custom_functions=[x] -> reward_score.custom_functions='x': must have the form data_source=module:function,
reward_score.custom_functions=['a=m:f','a=m:g'] -> reward_score.custom_functions='a=m:g': a already has m:f; name one fu
++reward_score.custom_kwargs.data_source=1 -> reward_score.custom_kwargs.data_source=1: must be a name of your own
++reward_score.custom_kwargs.a=1 -> reward_score.custom_kwargs={'a': 1}: are used only with reward_score.custom_function
reward_model.enable=true reward_model.model.lora.rank=4 -> reward_model.model.lora.rank=4: a reward model is not trained
data.apply_chat_template_kwargs={tokenize:false}
    -> data.apply_chat_template_kwargs.tokenize: unknown key; a new entry of data.apply_chat_template_kwargs needs a plu
+data.apply_chat_template_kwargs={padding:max_length,max_length:9}
    -> data.apply_chat_template_kwargs={'padding': 'max_length', 'max_length': 9}: max_length, padding cannot be set her
calculator.metric_indices_add=[avg_log_probs,avg_log_probs]
    -> calculator.metric_indices_add=['avg_log_probs', 'avg_log_probs']: name each once; your own are known by the names
calculator.metric_indices_add=[avg_logprobs]
    -> calculator.metric_indices_add[0]='avg_logprobs': must be one of avg_log_probs, avg_response_entropy, avg_logits_e
algorithm.rollout_correction.rollout_rs=token_k1
    -> algorithm.rollout_correction.rollout_rs_threshold=None: needs one threshold, or one for each of the 1 rules
algorithm.rollout_correction.rollout_rs_threshold=2
    -> algorithm.rollout_correction.rollout_rs_threshold=[2]: is used only with rollout_rs; set that
algorithm.rollout_correction.rollout_rs=seq_k1 algorithm.rollout_correction.rollout_rs_threshold=2
    -> algorithm.rollout_correction.rollout_rs='seq_k1': must be one of token_k1, token_k2, token_k3, seq_sum_k1, seq_su
algorithm.rollout_correction.rollout_rs=token_k3 algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0'
    -> algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0': token_k3 takes one number in nats
algorithm.rollout_correction.rollout_rs=seq_mean_k1 algorithm.rollout_correction.rollout_rs_threshold='2_0.5'
    -> algorithm.rollout_correction.rollout_rs_threshold='2_0.5': seq_mean_k1 takes two ratios such as 0.5_2.0, or the u
algorithm.rollout_correction.rollout_rs=token_k1 algorithm.rollout_correction.rollout_rs_threshold=x
    -> algorithm.rollout_correction.rollout_rs_threshold='x': token_k1 takes two ratios such as 0.5_2.0, or the upper on
algorithm.rollout_correction.rollout_token_veto_threshold=1.0
    -> algorithm.rollout_correction.rollout_token_veto_threshold=1.0: must be in [1e-8, 1)
+rollout.engine_kwargs.speculative_config.method=ngram
    -> rollout.engine_kwargs.speculative_config={'method': 'ngram'}: its log-probabilities are not those of the samples;
rollout.name=hf +rollout.engine_kwargs.block_size=16
    -> rollout.engine_kwargs={'block_size': 16}: rollout.name=hf has no such arguments; leave it empty
+rollout.engine_kwargs.additional_config.hidden_states.layers=1
    -> rollout.engine_kwargs.additional_config={'hidden_states': {'layers': 1}}: set calculator.* instead of hidden_stat
+rollout.engine_kwargs.additional_config.sampling_streams=false
    -> rollout.engine_kwargs.additional_config={'sampling_streams': False}: set rollout.seeded instead of sampling_strea
actor_rollout_ref.rollout.multi_turn.enable=true
    -> actor_rollout_ref.rollout.multi_turn.enable: unknown key; multi-turn rollout with tools is not supported: a respo
actor.kl_loss_type=m:f ++actor.kl_loss_type_kwargs.a-b=1
    -> actor.kl_loss_type_kwargs.a-b=1: its name must be that of a keyword argument
reward_manager.guidance_metric=avg_log_probs
    -> reward_manager.guidance_metric='avg_log_probs': is not computed, but ['Effective Rank', 'Effective Rank diff', 'E
trainer.nnodes=4 trainer.min_nnodes=2 trainer.n_gpus_per_node=1 model.fsdp.fsdp_size=2
    -> model.fsdp.fsdp_size=2: must divide trainer.nnodes*trainer.n_gpus_per_node=3; set one of [1, 3]
reward_score.overlong_buffer.enable=true reward_score.overlong_buffer.len=160
    -> reward_score.overlong_buffer.len=160: must be below data.max_response_length=160
algorithm.filter_groups.enable=true data.gen_batch_size=20 algorithm.filter_groups.max_num_gen_batches=2
    -> algorithm.filter_groups.max_num_gen_batches=2: so many batches of data.gen_batch_size=20 prompts do not fill data
algorithm.filter_groups.enable=true algorithm.filter_groups.metric=seq_final_reward algorithm.use_kl_in_reward=true
    -> algorithm.filter_groups.metric='seq_final_reward': the KL penalty of algorithm.use_kl_in_reward makes every rewar
reward_model.enable=true reward_model.rule_weight=0 reward_model.weight=0
    -> reward_model.weight=0.0: both weights are 0; set one
actor.use_dynamic_bsz=true data.max_prompt_length=80 data.max_response_length=120 actor.ppo_max_token_len_per_gpu=100
    -> actor.ppo_max_token_len_per_gpu=100: must hold one sequence: data.max_prompt_length+data.max_response_length=200
model.lora.target_modules=[all-linear,q_proj]
    -> model.lora.target_modules=['all-linear', 'q_proj']: all-linear covers all layers; leave out the others
model.ulysses_sequence_parallel_size=2 model.use_remove_padding=false
    -> model.ulysses_sequence_parallel_size=2: only packed sequences can be split; set model.use_remove_padding=true
data.train_weights=[1] data.custom_cls.path=a.py data.custom_cls.name=A
    -> data.train_weights=[1.0]: with data.custom_cls or data.sampler, your class does the mixing; leave it out
algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0 algorithm.use_kl_in_reward=true
    -> algorithm.kl_ctrl.kl_coef=0.0: adaptive control multiplies it, so it must be above 0
algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.horizon=10 algorithm.use_kl_in_reward=true
    -> algorithm.kl_ctrl.horizon=10.0: adaptive control would overshoot with 384 responses per step; set it above 76.8
"""


def cases(table: str) -> list[tuple[str, ...]]:
    """Overrides and message of each entry; a long message has a line of its own."""
    return [tuple(line.split(" -> ")) for line in table.replace("\n    ->", " ->").splitlines()]


@pytest.mark.parametrize(("overrides", "message"), cases(REFUSALS))
def test_a_wrong_option_is_named_with_its_value_and_fix(overrides: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, "ppo_trainer", overrides.split())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_group_that_is_made_in_code_is_checked_too():
    values = load_config(PPOConfig, "ppo_trainer").reward_manager.__dict__
    for option, (value, message) in {
        "kappa": (0.5, "kappa=0.5: must be at least 1"),
        "w_explore": ([], "w_explore=[]: needs one weight per indicator"),
        "hypothesis_type": ("PlanC", "hypothesis_type='PlanC': must be one of PlanB, FixTwo, FixOne"),
    }.items():
        with pytest.raises(ConfigError, match="^" + re.escape(message)):
            RewardManagerConfig(**values | {option: value})


# Two workers hold the sequence together; a critic alone needs no group; nothing is shaped.
ALLOWED = """\
actor.use_dynamic_bsz=true model.use_remove_padding=true model.ulysses_sequence_parallel_size=2 \
data.max_prompt_length=80 data.max_response_length=120 actor.ppo_max_token_len_per_gpu=100
rollout.n=1
experiment=grpo calculator.enable=false"""


@pytest.mark.parametrize("overrides", ALLOWED.splitlines())
def test_what_a_similar_config_may_do(overrides: str):
    load_config(PPOConfig, "ppo_trainer", overrides.split())
