"""Configs that load, and the message of each that does not."""

from contextlib import nullcontext
from dataclasses import FrozenInstanceError, asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl.checkpoint.attempts import run_lock
from verl.config import CONFIG_DIR, ConfigError, PPOConfig, SFTConfig, load_config
from verl.config.load import compose_config, parse_config, parse_run_config, require_folder
from verl.config.rollout_correction import Rejection


@pytest.mark.slow
def test_every_yaml_loads():
    for path in CONFIG_DIR.glob("*/*.yaml"):
        if path.parent.name != "evaluation":  # test_evaluation.py has these
            config = load_config(PPOConfig, "ppo_trainer", [f"{path.parent.name}={path.stem}"])
            assert path.parent.name != "experiment" or config.trainer.experiment_name == path.stem
    assert {path.stem for path in CONFIG_DIR.glob("*.yaml")} == {"ppo_trainer", "sft", "evaluation", "analysis"}
    assert load_config(SFTConfig, "sft").data.messages_key == "messages"


TOKENS = "actor.ppo_max_token_len_per_gpu"
BUDGET = f"actor.use_dynamic_bsz=true data.max_prompt_length=72 data.max_response_length=128 {TOKENS}"
SPLIT = "model.use_remove_padding=true model.ulysses_sequence_parallel_size=2"
RANKS = "calculator.metric_indices"
GUIDE = "reward_manager.guidance_metric"
RELEASED = ("released_code", "released_code_later")
WORLD = "trainer.nnodes*trainer.n_gpus_per_node"
TOTAL = "data.max_prompt_length+data.max_response_length=200"
BATCH, MINI, LONG = "data.train_batch_size", "actor.ppo_mini_batch_size", "reward_score.overlong_buffer"
FILTER = "algorithm.filter_groups.enable=true"
CORRECTION = "algorithm.rollout_correction.rollout_rs"
VETO = "algorithm.rollout_correction.rollout_token_veto_threshold"
JUDGE = "reward_model.enable=true reward_model.rule_weight=0"
ENGINE, TURNS = "rollout.engine_kwargs", "rollout.multi_turn"
NO_TURNS = "unknown key; multi-turn rollout with tools is not supported: a response is one turn"
REFUSALS = [
    ("data.shufle=1", "data.shufle: unknown key; did you mean data.shuffle?"),
    ("rolout.n=3", "rolout: unknown key; did you mean rollout?"),
    (
        "rollout.val_kwargs.zzz=1",
        "rollout.val_kwargs.zzz: unknown key; known here: n, temperature, top_p, top_k, min_p,",
    ),
    ("rollout=nothing", "In 'ppo_trainer': Could not find 'rollout/nothing' Available options in 'rollout': vllm"),
    ("+data.shufle=1", "data.shufle=1: unknown key; did you mean data.shuffle?"),
    ("+rollout.val_kwargs.tempratur=1", "rollout.val_kwargs.tempratur=1: unknown key; did you mean rollout.val_kw"),
    ("+zzz=1", "zzz=1: unknown key; known here: device, seed, data, model, actor"),
    ("rollout.n=???", "rollout.n: has no value; set it in the YAML or on the command line"),
    ("~rollout.n", "rollout.n: has no value; set it in the YAML or on the command line"),
    ("rollout.n=${nowhere}", "rollout.n: Interpolation key 'nowhere' not found"),
    # Types. To Python a bool is an integer; to a user it is a slip.
    ("seed=eight", "seed='eight': must be an integer, not str"),
    ("seed=1.5", "seed=1.5: must be an integer, not float"),
    ("seed=true", "seed=True: must be an integer, not bool"),
    ("rollout.temperature=true", "rollout.temperature=True: must be a number, not bool"),
    ("data.shuffle=1", "data.shuffle=1: must be true or false, not int"),
    ("data.truncation=1", "data.truncation=1: must be text, not int"),
    ("rollout.n=null", "rollout.n=None: must be an integer, not NoneType"),
    ("actor.optim.betas=[0.9,x]", "actor.optim.betas[1]='x': must be a number, not str"),
    ("actor.tis_cap=inf", "actor.tis_cap=inf: must be a finite number"),
    ("reward_model.weight=nan", "reward_model.weight=nan: must be a finite number"),
    # Ranges; a group that is used in several places is named in full.
    ("seed=-1", "seed=-1: must be from 0 to 4294967295"),
    ("actor.optim.lr=0", "actor.optim.lr=0.0: must be greater than 0"),
    ("actor.clip_ratio_c=0.5", "actor.clip_ratio_c=0.5: must be above 1, or null"),
    ("actor.optim.lr_warmup_steps=-2", "actor.optim.lr_warmup_steps=-2: must be at least 0, or -1 for lr_warmup_steps"),
    ("actor.optim.lr_warmup_steps_ratio=2", "actor.optim.lr_warmup_steps_ratio=2.0: must be in [0, 1]"),
    ("actor.optim.lr_warmup_steps_ratio=0.1", "actor.optim.lr_warmup_steps_ratio=0.1: lr_warmup_steps=4 comes first"),
    ("algorithm.gamma=1.5", "algorithm.gamma=1.5: must be in [0, 1]"),
    ("algorithm.lam=-0.1", "algorithm.lam=-0.1: must be in [0, 1]"),
    ("trainer.total_training_steps=-1", "trainer.total_training_steps=-1: must be at least 0"),
    ("trainer.save_freq=-2", "trainer.save_freq=-2: must be -1 (never), 0 (after the last step) or greater"),
    ("trainer.test_freq=-2", "trainer.test_freq=-2: must be -1 (never), 0 (after the last step) or greater"),
    ("trainer.report_freq=-2", "trainer.report_freq=-2: must be -1 (never), 0 (at the end of the run) or greater"),
    ("trainer.critic_warmup=-1", "trainer.critic_warmup=-1: must be at least 0"),
    ("trainer.machines_timeout_s=0", "trainer.machines_timeout_s=0.0: must be greater than 0"),
    # A value would be written into config.yaml.
    (
        "trainer.env=['MY_KEY=hush']",
        "trainer.env='MY_KEY': names variables only, such as MY_CACHE or MY_*; set their values",
    ),
    ("trainer.except_save=[5,0]", "trainer.except_save=[5, 0]: steps are counted from 1"),
    ("data.val_sample_size=0", "data.val_sample_size=0: must be -1 or at least 1"),
    ("data.train_max_samples=0", "data.train_max_samples=0: must be -1 or at least 1"),
    ("data.val_max_samples=5", "data.val_max_samples: unknown key; did you mean data.val_sample_size?"),
    ("data.train_weights=[1,2]", "data.train_weights=[1.0, 2.0]: data.train_files has 1 entries; name one weight"),
    (
        "data.apply_chat_template_kwargs={tokenize:false}",
        "data.apply_chat_template_kwargs.tokenize: unknown key; a new entry of data.apply_chat_template_kw",
    ),
    ("data.train_weights=[0]", "data.train_weights=[0.0]: needs a weight above 0"),
    (
        "data.train_weights=[1e308,1e308] data.train_files=[a.jsonl,b.jsonl]",
        "data.train_weights[0]=1e+308: must be a number up to 3.4e+38 in size, as in float32",
    ),
    ("data.train_weights=[-1]", "data.train_weights=-1.0: must be at least 0"),
    ("data.custom_cls.path=a.py", "data.custom_cls.name=None: path='a.py': set both path and name, or neither"),
    ("data.sampler.class_name=A", "data.sampler.class_name='A': class_path=None: set both class_path and class_name"),
    (
        "+data.apply_chat_template_kwargs={tokenize:false}",
        "data.apply_chat_template_kwargs={'tokenize': False}: tokenize cannot be set here; leave it out",
    ),
    (
        "+data.apply_chat_template_kwargs={padding:max_length,max_length:9}",
        "data.apply_chat_template_kwargs={'padding': 'max_length', 'max_length': 9}: max_length, padding cannot be set",
    ),
    ("reward_score.overlong_buffer.len=0", "reward_score.overlong_buffer.len=0: must be greater than 0"),
    ("rollout.top_p=0", "rollout.top_p=0.0: must be in (0, 1]"),
    (f"{RANKS}=[]", f"{RANKS}=[]: name at least one"),
    (f"{RANKS}=[1,1]", f"{RANKS}=[1, 1]: name each once"),
    (f"{RANKS}_add=[avg_log_probs,avg_log_probs]", f"{RANKS}_add=['avg_log_probs', 'avg_log_probs']: name each once"),
    (f"{RANKS}_add=[avg_logprobs]", f"{RANKS}_add[0]='avg_logprobs': must be one of avg_log_probs, avg_response_entr"),
    (f"{RANKS}=[5]", f"{RANKS}=[5]: indices run from 0 to 4: ['Response Entropy"),
    (f"{CORRECTION}=token_k1", f"{CORRECTION}_threshold=None: needs one threshold, or one for each of the 1 rules"),
    (f"{CORRECTION}_threshold=2", f"{CORRECTION}_threshold=[2]: is used only with {CORRECTION}; set that"),
    (f"{CORRECTION}=seq_k1 {CORRECTION}_threshold=2", f"{CORRECTION}='seq_k1': must be one of token_k1, token_k2, t"),
    (
        f"{CORRECTION}=token_k3 {CORRECTION}_threshold='0.5_2.0'",
        f"{CORRECTION}_threshold='0.5_2.0': token_k3 takes one",
    ),
    (
        f"{CORRECTION}=seq_mean_k1 {CORRECTION}_threshold='2_0.5'",
        f"{CORRECTION}_threshold='2_0.5': seq_mean_k1 takes two",
    ),
    (f"{CORRECTION}=token_k1 {CORRECTION}_threshold=x", f"{CORRECTION}_threshold='x': token_k1 takes two ratios such"),
    # No number that would only fail where it is used.
    ("actor.optim.lr=5", "actor.optim.lr=5.0: must be greater than 0 and at most 1"),
    ("actor.optim.betas=[1,2]", "actor.optim.betas=[1.0, 2.0]: needs two numbers in [0, 1), such as [0.9,0.999]"),
    ("critic.optim.betas=[-0.1,0.9]", "critic.optim.betas=[-0.1, 0.9]: needs two numbers in [0, 1)"),
    ("actor.optim.eps=1e-300", "actor.optim.eps=1e-300: must be greater than 0 (1e-38, in float32)"),
    ("actor.optim.weight_decay=-5", "actor.optim.weight_decay=-5.0: must be at least 0, and times optim.lr="),
    ("actor.optim.weight_decay=1e6", "actor.optim.weight_decay=1000000.0: must be at least 0, and times optim.lr="),
    ("actor.tis_cap=1e300", "actor.tis_cap=1e+300: must be a number up to 3.4e+38 in size, as in float32"),
    ("data.train_batch_size=5000000000", "data.train_batch_size=5000000000: must be an integer up to 4294967295 in si"),
    ("actor.clip_cov_lb=9 actor.clip_cov_ub=8", "actor.clip_cov_lb=9.0: must be below actor.clip_cov_ub=8"),
    ("rollout.stop_token_ids=[3,-1]", "rollout.stop_token_ids=[3, -1]: tokens are numbered from 0"),
    ("rollout.temperature=1e-9", "rollout.temperature=1e-09: must be at least 0: 0 for greedy decoding, or from 0.01"),
    ("rollout.val_kwargs.temperature=-1", "rollout.val_kwargs.temperature=-1.0: must be at least 0: 0 for greedy"),
    ("rollout.repetition_penalty=1e-9", "rollout.repetition_penalty=1e-09: must be greater than 0, from 0.01 to 100"),
    ("reward_score.num_workers=99999", "reward_score.num_workers=99999: must be from 0 to 4096"),
    (
        "reward_score.timeout_s=1e12",
        "reward_score.timeout_s=1000000000000.0: must be greater than 0, and at most 3153600",
    ),
    (
        "trainer.nccl_timeout_s=1e12",
        "trainer.nccl_timeout_s=1000000000000.0: must be greater than 0, and at most 3153600",
    ),
    ("trainer.nnodes=1000000000", "trainer.nnodes=1000000000: must be greater than 0 and at most 100000"),
    ("trainer.n_gpus_per_node=1000000000", "trainer.n_gpus_per_node=1000000000: must be greater than 0 and at mos"),
    ("model.lora.rank=1000000", "model.lora.rank=1000000: must be at least 0 and at most 65536"),
    # A name that is known in another group.
    ("max_response_length=5", "max_response_length: unknown key; did you mean data.max_response_length?"),
    ("+max_response_length=5", "max_response_length=5: unknown key; did you mean data.max_response_length?"),
    ("rollout.max_response_length=5", "rollout.max_response_length: unknown key; did you mean data.max_response_len"),
    ("optim.lr=1", "optim: unknown key; did you mean actor.optim.lr or critic.optim.lr?"),
    ("model.lora_rank=4", "model.lora_rank: unknown key; did you mean model.lora.rank?"),
    ("critic.optim={lrr:1}", "critic.optim.lrr: unknown key; did you mean critic.optim.lr?"),
    ("trainer.logger={a:b}", "trainer.logger: must be a list, [a,b]"),
    # A group is chosen by name.
    ("model=null", "model=null: must be one of llama3.2_3b, mistral_7b"),
    ("model=5", "model=5: is a group of options; set one of model.path"),
    ("model=true", "model=true: is a group of options; set one of model.path"),
    ("model=1e3", "model=1e3: is a group of options; set one of model.path"),
    ("+model=5", "model=5: is a group of options; set one of model.path"),
    ("++data=null", "data=null: must be one of arithmetic"),
    ("experiment=5", "experiment=5: must be one of "),
    ("preset=[5]", "preset=[5]: must be one of embedded"),
    ("model@critic.model=5", "model@critic.model=5: must be one of llama3.2_3b"),
    ("actor.optim=null", "actor.optim=None: must be a group of options: lr, betas"),
    # Choices.
    ("algorithm.adv_estimator=grop", "algorithm.adv_estimator='grop': must be one of grpo, rloo, "),
    ("algorithm.kl_ctrl.type=adaptve", "algorithm.kl_ctrl.type='adaptve': must be one of fixed, adaptive; did you"),
    ("algorithm.filter_groups.metric=accuracy", "algorithm.filter_groups.metric='accuracy': must be one of acc, "),
    ("actor.policy_loss=ppo", "actor.policy_loss='ppo': must be one of ppo_clip, gspo, cispo, gmpo"),
    ("actor.loss_agg_mode=token_mean", "actor.loss_agg_mode='token_mean': must be one of token-mean"),
    ("actor.tis_level=tokens", "actor.tis_level='tokens': must be one of none, token, sequence; did you mean"),
    ("actor.optim.lr_scheduler_type=step", "actor.optim.lr_scheduler_type='step': must be one of constant, linear,"),
    ("calculator.zeroth_order_svd_method=x", "calculator.zeroth_order_svd_method='x': must be one of full, lowrank"),
    ("calculator.diff_svd_method=half", "calculator.diff_svd_method='half': must be one of full, lowrank"),
    ("calculator.diff_calculator_method=fast", "calculator.diff_calculator_method='fast': must be one of optimized, o"),
    ("calculator.prefix_rule=at", "calculator.prefix_rule='at': must be one of after_stride, after_stride_and_whole, "),
    ("calculator.max_seq_len_from=both", "calculator.max_seq_len_from='both': must be one of end, start"),
    ("calculator.metrics_dtype=bf16", "calculator.metrics_dtype='bf16': must be one of float64, bfloat16"),
    ("calculator.on_nonfinite=zeros", "calculator.on_nonfinite='zeros': must be one of raise, mask, zero"),
    (
        "reward_manager.baseline_start=zeros",
        "reward_manager.baseline_start='zeros': must be one of first_batch, zero; ",
    ),
    (
        "trainer.logger=wandbb",
        "trainer.logger[0]='wandbb': must be one of console, tensorboard, wandb, mlflow, swanlab",
    ),
    (
        "trainer.logger=[console,clearml]",
        "trainer.logger[1]='clearml': must be one of console, tensorboard, wandb, mlf",
    ),
    ("trainer.logger=[vemlp_wandb]", "trainer.logger[0]='vemlp_wandb': must be one of console, tensorboard, wandb, ml"),
    # What an engine may be told, and what the trainer depends on.
    ("rollout.min_p=1.5", "rollout.min_p=1.5: must be in [0, 1]"),
    ("rollout.val_kwargs.repetition_penalty=0", "rollout.val_kwargs.repetition_penalty=0.0: must be greater than 0"),
    ("rollout.stop=['',a]", "rollout.stop=['', 'a']: an empty string ends every response; leave it out"),
    (
        f"{ENGINE}.block_size=16",
        "rollout.engine_kwargs.block_size: unknown key; a new entry of rollout.engine_kwar",
    ),
    (f"+{ENGINE}.seed=3", "rollout.engine_kwargs.seed=3: set seed; the workers of one engine must draw alike"),
    (f"+{ENGINE}.logprobs_mode=raw_logits", "rollout.engine_kwargs.logprobs_mode='raw_logits': training needs the lo"),
    (f"+{ENGINE}.load_format=dummy", "rollout.engine_kwargs.load_format='dummy': the engine gets the policy's weights"),
    (f"+{ENGINE}.hf_overrides.a=1", "rollout.engine_kwargs.hf_overrides={'a': 1}: set model.override_config, which"),
    (f"+{ENGINE}.speculative_config.method=ngram", "rollout.engine_kwargs.speculative_config={'method': 'ngram'}: its"),
    (
        f"rollout.name=hf +{ENGINE}.block_size=16",
        "rollout.engine_kwargs={'block_size': 16}: rollout.name=hf has no such arguments; leave it empty",
    ),
    (
        f"+{ENGINE}.additional_config.hidden_states.layers=1",
        "rollout.engine_kwargs.additional_config={'hidden_states':",
    ),
    (
        f"+{ENGINE}.additional_config.sampling_streams=false",
        "rollout.engine_kwargs.additional_config={'sampling_streams': False}: set rollout.seeded instead of",
    ),
    ("rollout.name=hf rollout.seeded=false", "rollout.seeded=False: rollout.name=hf draws from streams alone; set it"),
    ("model.lora.dropout=1", "model.lora.dropout=1.0: must be in [0, 1)"),
    ("actor.optim.eps=0", "actor.optim.eps=0.0: must be greater than 0"),
    # What veRL has and is not here.
    ("actor_rollout_ref.rollout.multi_turn.enable=true", f"actor_rollout_ref.{TURNS}.enable: {NO_TURNS}"),
    (
        "+actor_rollout_ref.rollout.multi_turn.enable=true",
        "actor_rollout_ref={'rollout': {'multi_turn': {'enable': T",
    ),
    (f"{TURNS}.enable=true", f"{TURNS}.enable: {NO_TURNS}"),
    (f"+{TURNS}.tool_config_path=x", f"{TURNS}={{'tool_config_path': 'x'}}: {NO_TURNS}"),
    ("rollout.mode=async", "rollout.mode: unknown key; asynchronous rollout is not supported: all responses of a step"),
    (
        "+rollout.agent.num_workers=8",
        "rollout.agent={'num_workers': 8}: unknown key; rollout by agents is not suppor",
    ),
    (
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.n: unknown key; its groups stand alone here: model",
    ),
    # Code of one's own.
    ("actor.kl_loss_type=k4", "actor.kl_loss_type='k4': must be one of kl, k1, abs"),
    (
        "algorithm.adv_estimator=mine.py:",
        "algorithm.adv_estimator='mine.py:': an import path is module:attribute or fi",
    ),
    (
        "algorithm.reward_transform=square",
        "algorithm.reward_transform='square': an import path is module:attribute or file.py",
    ),
    (
        "algorithm=remax algorithm.reward_transform=m:f",
        "algorithm.reward_transform='m:f': remax compares with a greedy response's reward, which no",
    ),
    (
        "++algorithm.adv_estimator_kwargs.a=1",
        "algorithm.adv_estimator_kwargs={'a': 1}: are for your own algorithm.adv_estimator=module:attribute; set that",
    ),
    (
        "actor.kl_loss_type=m:f ++actor.kl_loss_type_kwargs.a-b=1",
        "actor.kl_loss_type_kwargs.a-b=1: its name must be that of a keyword argument",
    ),
    ("calculator.own_metrics=[m:f,n.py:f]", "calculator.own_metrics=['m:f', 'n.py:f']: name each once; your own are"),
    ("calculator.own_metrics=[rank]", "calculator.own_metrics='rank': must be module:function or file.py:function"),
    # Combinations.
    ("algorithm=grpo_passk rollout.n=1", "rollout.n=1: grpo_passk compares the two best responses to a prompt; set ro"),
    ("algorithm.use_pf_ppo=true", "algorithm.use_pf_ppo=True: belongs to algorithm.adv_estimator=gae; set it to false"),
    (
        "actor.bypass_mode=true actor.tis_level=token",
        "actor.tis_level='token': with actor.bypass_mode the ratio of ppo_clip is to the engine already; set it to",
    ),
    (f"{VETO}=1.0", f"{VETO}=1.0: must be in [1e-8, 1), or null"),
    (
        "algorithm=gae critic.model.lora_adapter_path=a",
        "critic.model.lora_adapter_path='a': only the policy starts from an adapter; merge it into the model, and set",
    ),
    ("rollout.val_kwargs.n=2", "rollout.val_kwargs.n=2: greedy decoding (temperature=0) gives one response; set"),
    ("rollout.max_num_batched_tokens=8", "rollout.max_num_batched_tokens=8: must be at least rollout.max_num_seqs=256"),
    (f"{BATCH}=20", f"{MINI}=24: must be at most {BATCH}=20"),
    ("algorithm=gae critic.ppo_mini_batch_size=50", f"critic.ppo_mini_batch_size=50: must be at most {BATCH}=48"),
    (
        "calculator.enable=false",
        "calculator.enable=False: rank shaping needs rank metrics; set calculator.enable=true, ",
    ),
    ("calculator.compute_diff=false", "reward_manager.indicator_names='Effective Rank diff 2': is not computed, but ["),
    (f"{GUIDE}=avg_log_probs", f"{GUIDE}='avg_log_probs': is not computed, but ['Effective Rank', 'Effective Rank d"),
    ("reward_manager.w_explore=[1]", "reward_manager.w_explore=[1.0]: needs one weight per indicator, 3: ['Effective"),
    ("actor.policy_loss=gspo actor.clip_ratio_c=3", "actor.clip_ratio_c=3.0: gspo has no dual clip; set it to null"),
    ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.type='adaptive': adaptive control needs the KL divergence"),
    ("trainer.critic_warmup=1", "trainer.critic_warmup=1: grpo has no critic; set it to 0"),
    ("trainer.resume_mode=path", "trainer.resume_from_path=None: trainer.resume_mode=path needs a checkpoint; name"),
    ("trainer.max_restarts=-1", "trainer.max_restarts=-1: must be at least 0"),
    ("trainer.min_nnodes=0", "trainer.min_nnodes=0: must be from 1 to trainer.nnodes=1, or null"),
    ("trainer.min_nnodes=2", "trainer.min_nnodes=2: must be from 1 to trainer.nnodes=1, or null"),
    (
        "trainer.nnodes=4 trainer.min_nnodes=2 trainer.n_gpus_per_node=1 model.fsdp.fsdp_size=2",
        "model.fsdp.fsdp_size=2: must divide trainer.nnodes*trainer.n_gpus_per_node=3; set one of [1, 3]",
    ),
    ("trainer.detection_s=0.5", "trainer.detection_s=0.5: must be from 1 to 86400"),
    ("trainer.detection_s=1e12", "trainer.detection_s=1000000000000.0: must be from 1 to 86400"),
    ("trainer.nccl_timeout_s=0", "trainer.nccl_timeout_s=0.0: must be greater than 0"),
    ("trainer.phase_timeout_s=-1", "trainer.phase_timeout_s=-1.0: must be at least 0"),
    ("trainer.resume_from_path=a/b", "trainer.resume_from_path='a/b': is used only with trainer.resume_mode=path"),
    ("trainer.val_only=true data.val_files=[]", "trainer.val_only=True: there are no validation prompts"),
    (f"{LONG}.enable=true {LONG}.len=160", f"{LONG}.len=160: must be below data.max_response_length=160"),
    (
        "data.gen_batch_size=96",
        "data.gen_batch_size=96: without algorithm.filter_groups a step samples data.train_batch",
    ),
    (f"{FILTER} data.gen_batch_size=0", "data.gen_batch_size=0: must be greater than 0"),
    (
        f"{FILTER} data.gen_batch_size=20 algorithm.filter_groups.max_num_gen_batches=2",
        "algorithm.filter_groups.max_num_gen_batches=2: so many batches of data.gen_batch_size=20 prompts do not fill",
    ),
    (
        f"{FILTER} algorithm.filter_groups.metric=seq_final_reward algorithm.use_kl_in_reward=true",
        "algorithm.filter_groups.metric='seq_final_reward': the KL penalty of algorithm.use_kl_in_reward makes every",
    ),
    (f"{FILTER} algorithm=gae rollout.n=1", "rollout.n=1: algorithm.filter_groups compares the responses to one prom"),
    (f"{JUDGE} reward_model.weight=0", "reward_model.weight=0.0: both weights are 0; set one"),
    ("rollout.name=hf rollout.tensor_parallel_size=2", "rollout.tensor_parallel_size=2: rollout.name=hf has no tensor"),
    (f"{BUDGET}=100", f"{TOKENS}=100: must hold one sequence: {TOTAL}"),
    (f"{BUDGET}=99 {SPLIT}", f"{TOKENS}=99: must hold one sequence, split over 2 workers: {TOTAL}"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSALS)
def test_a_wrong_option_is_named_with_its_value_and_fix(overrides: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, "ppo_trainer", overrides.split())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# Two workers hold the sequence together; a critic alone needs no group; nothing is shaped.
ALLOWED = [f"{BUDGET}=100 {SPLIT}", "rollout.n=1", "experiment=grpo calculator.enable=false"]


@pytest.mark.parametrize("overrides", ALLOWED)
def test_what_a_similar_config_may_do(overrides: str):
    load_config(PPOConfig, "ppo_trainer", overrides.split())


def test_the_released_code_differs_from_the_shipped_signal_in_its_known_defects():
    shipped = load_config(PPOConfig, "ppo_trainer", ["experiment=verl_grpo"])
    released = load_config(PPOConfig, "ppo_trainer", ["experiment=released_code"])

    def differing(group: str) -> set[str]:
        ours, theirs = asdict(getattr(shipped, group)), asdict(getattr(released, group))
        return {name for name in ours if ours[name] != theirs[name]}

    defects = {"max_seq_len", "metrics_dtype", "on_nonfinite"}
    assert differing("calculator") == defects | {"metric_indices", "diff_stride"}
    assert differing("reward_score") == {"mode"}
    defects = {"phi_without_reward", "baseline_start", "shaping_placement"}
    # The same indicators in another order.
    assert differing("reward_manager") == defects | {"aux_fix", "indicator_names", "w_explore", "w_exploit"}
    weights = {"Effective Rank diff 2": (0.0, 0.0), "Effective Rank diff": (0.0, 1.0), "Effective Rank": (1.0, 0.0)}
    for side in (shipped.reward_manager, released.reward_manager):
        pairs = zip(side.w_explore, side.w_exploit, strict=True)
        assert dict(zip(side.indicator_names, pairs, strict=True)) == weights
    assert differing("actor") == differing("algorithm") == differing("rollout") == set()


def test_the_later_released_code_differs_from_the_first():
    first, later = (load_config(PPOConfig, "ppo_trainer", [f"experiment={name}"]) for name in RELEASED)

    def differing(group: str) -> dict[str, object]:
        old, new = asdict(getattr(first, group)), asdict(getattr(later, group))
        return {name: new[name] for name in old if old[name] != new[name]}

    token_metrics = ["avg_log_probs", "avg_response_entropy", "avg_logits_entropy"]
    assert differing("calculator") == {
        "diff_stride": 128,
        "max_seq_len": None,
        "prefix_rule": "after_stride_and_whole",
        "metric_indices_add": token_metrics,
    }
    assert differing("reward_manager") == {
        "phi_without_reward": True,
        "indicator_names": [*first.reward_manager.indicator_names, *token_metrics[:2]],
        "guidance_metric": "Effective Rank diff 2",
        "w_explore": [0.0, 0.0, 1.0, 0.0, 0.0],
        "w_exploit": [0.0, 1.0, 0.0, 0.0, 0.0],
    }
    assert differing("actor") == differing("algorithm") == differing("rollout") == differing("reward_score") == {}


@pytest.mark.parametrize("override", ["data.val_files=[]", "trainer.test_freq=-1"])
def test_stopping_early_needs_validation(override: str):
    with pytest.raises(ConfigError, match=r"trainer\.stop_at_sequence_probability=0\.5: .* set data\.val_files"):
        load_config(SFTConfig, "sft", ["trainer.stop_at_sequence_probability=0.5", override])


def test_what_an_engine_and_a_model_may_be_told_goes_through():
    overrides = ["+rollout.engine_kwargs.additional_config.a.b=1", "rollout.engine_kwargs.block_size=32"]
    overrides[1] = f"+{overrides[1]}"
    overrides += ["+model.override_config.rope_scaling={rope_type:yarn,factor:4.0}", "rollout.stop=[x,'\n\n']"]
    config = load_config(PPOConfig, "ppo_trainer", [*overrides, "rollout.min_p=0.1", "algorithm=gae"])
    assert config.rollout.engine_kwargs == {"additional_config": {"a": {"b": 1}}, "block_size": 32}
    assert config.model.override_config == {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert config.critic.model.override_config == config.model.override_config
    assert config.rollout.train_kwargs.min_p == 0.1 and config.rollout.stop == ["x", "\n\n"]


@pytest.mark.parametrize(
    ("epochs", "limit", "expected"),
    [
        (10, 80, "80 steps: trainer.total_training_steps=80 comes before trainer.total_epochs=10 (210 steps, 21 each)"),
        (2, 80, "42 steps: trainer.total_epochs=2 (42 steps, 21 each) before trainer.total_training_steps=80"),
        (2, 42, "42 steps: trainer.total_epochs=2 (42 steps, 21 each)"),
        (2, 0, "42 steps: trainer.total_epochs=2 (42 steps, 21 each)"),
    ],
)
def test_one_line_says_what_ends_the_run(epochs: int, limit: int, expected: str):
    overrides = [f"trainer.total_epochs={epochs}", f"trainer.total_training_steps={limit}"]
    note = load_config(PPOConfig, "ppo_trainer", overrides).trainer.length_note(21)
    assert note == f"the run ends after {expected}"


@pytest.mark.parametrize(
    ("rules", "bounds", "expected"),
    [
        ("null", "null", []),
        ("token_k1", "2.0", [("token_k1", 0.5, 2.0)]),
        ("seq_mean_k1", "'0.999_1.001'", [("seq_mean_k1", 0.999, 1.001)]),
        ("'token_k1,seq_max_k2'", "'0.25_4.0,2'", [("token_k1", 0.25, 4.0), ("seq_max_k2", None, 2.0)]),
        ("[token_k2,seq_sum_k3]", "0.5", [("token_k2", None, 0.5), ("seq_sum_k3", None, 0.5)]),
    ],
)
def test_rejection_rules_are_written_as_in_verl(rules: str, bounds: str, expected: list[Rejection]):
    config = load_config(PPOConfig, "ppo_trainer", [f"{CORRECTION}={rules}", f"{CORRECTION}_threshold={bounds}"])
    assert config.algorithm.rollout_correction.rejections == expected


def test_integers_pass_as_floats_and_a_lone_element_as_a_list_and_nothing_changes_later():
    config = load_config(PPOConfig, "ppo_trainer", ["rollout.temperature=2", "trainer.logger=wandb"])
    assert config.rollout.temperature == 2.0 and type(config.rollout.temperature) is float
    assert config.trainer.logger == ["wandb"]
    with pytest.raises(FrozenInstanceError):
        config.actor.optim.lr = 1.0  # type: ignore[misc]


@pytest.fixture
def run_tree(tmp_path: Path):
    """A config whose model, data and run folder are in order, as the tree that Hydra hands over."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.parquet").touch()
    config = OmegaConf.load(CONFIG_DIR / "sft.yaml")
    del config["defaults"], config["hydra"]
    config.model = OmegaConf.merge(
        *(OmegaConf.load(CONFIG_DIR / path) for path in ("engine/default.yaml", "model/tiny.yaml"))
    )
    config.model.path = str(tmp_path / "model")
    config.data.train_files = [str(tmp_path / "train.parquet")]
    config.data.val_files = []
    config.trainer.default_local_dir = str(tmp_path / "run")
    return config


@pytest.mark.parametrize("field", ["train_files", "val_files"])
def test_a_missing_data_file_is_named(run_tree, field: str):
    run_tree.data[field] = ["nowhere/x.parquet"]
    with pytest.raises(
        ConfigError,
        match=rf"^data\.{field}='nowhere/x\.parquet': no such file; name a parquet, jsonl or json file, or a hub",
    ):
        parse_run_config(SFTConfig, run_tree)


def test_a_hub_id_passes_and_a_relative_folder_does_not(run_tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_tree.model.path = "Qwen/Qwen2.5-1.5B"
    assert parse_run_config(SFTConfig, run_tree).model.path == "Qwen/Qwen2.5-1.5B"
    run_tree.model.path = str(tmp_path)
    with pytest.raises(ConfigError, match=r"^model\.path='.*': no config\.json there; .* or a hub id such as"):
        parse_run_config(SFTConfig, run_tree)
    # The same spelling is a folder as soon as its parent exists here; data/ is one even if it was deleted.
    (tmp_path / "Qwen").mkdir()
    for path in ("Qwen/Qwen2.5-1.5B", "data/tiny_model"):
        run_tree.model.path = path
        restore = "restore the shipped model with `git checkout data`, or " if path.startswith("data/") else ""
        message = rf"^model\.path='{path}': no config\.json there; {restore}name a folder"
        with pytest.raises(ConfigError, match=message):
            parse_run_config(SFTConfig, run_tree)


@pytest.mark.parametrize(
    ("mode", "source", "files", "message"),
    [
        ("disable", None, "config.yaml", "already holds a run; name another folder or remove it"),
        (
            "auto",
            None,
            "metrics.jsonl",
            r"already exists and is not a run folder \(it has no config\.yaml\); name another",
        ),
        (
            "path",
            "other/global_step_4",
            "config.yaml global_step_5",
            "already holds a run other than that of trainer.res",
        ),
        ("path", "other/global_step_4", "config.yaml summary.json", "already holds a run other than"),
        # Killed before its first checkpoint: the same command starts again from the one that was named.
        ("path", "other/global_step_4", "config.yaml metrics.jsonl", None),
        # Requeued: it started from there too, and has its own by now.
        ("path", "other/global_step_4", "config.yaml=other/global_step_4 global_step_5", None),
        ("path", "other/global_step_4", "config.yaml=other/global_step_3 global_step_5", "already holds a run other"),
        ("auto", None, ".lock", None),
        # Killed while it wrote its first file.
        ("auto", None, ".lock .config.yaml.unfinished", None),
        ("auto", None, "config.yaml metrics.jsonl global_step_4", None),
        ("path", "run/global_step_4", "config.yaml global_step_4", None),
        ("path", "other/global_step_4", "", None),
        ("auto", None, "", None),
        ("disable", None, ".lock", None),
    ],
)
def test_a_run_does_not_overwrite_another(run_tree, tmp_path: Path, mode, source, files, message):
    (tmp_path / "run").mkdir()
    for name, _, started_from in (entry.partition("=") for entry in files.split()):
        text = f"trainer:\n  resume_from_path: {tmp_path / started_from}\n" if started_from else ""
        (tmp_path / "run" / name).write_text(text)
    run_tree.trainer.resume_mode = mode
    run_tree.trainer.resume_from_path = None if source is None else str(tmp_path / source)
    refused = pytest.raises(ConfigError, match=rf"^trainer\.default_local_dir='.*/run': {message}")
    with refused if message else nullcontext():
        assert parse_run_config(SFTConfig, run_tree).trainer.resume_mode == mode


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        ("", True),
        ("actor.bypass_mode=true calculator.metric_indices_add=[]", False),
        ("actor.bypass_mode=true calculator.metric_indices_add=[avg_logits_entropy]", True),
        ("actor.bypass_mode=true calculator.source=actor", True),
        (f"actor.bypass_mode=true {VETO}=1e-4", True),
        ("actor.bypass_mode=true algorithm=optimal_token_baseline", True),
        ("actor.bypass_mode=true actor.policy_loss=gpg actor.tis_level=token", False),
        ("actor.bypass_mode=true actor.policy_loss=gpg actor.tis_level=token actor.tis_normalize=true", True),
    ],
)
def test_bypass_mode_saves_a_pass_that_nothing_needs(options: str, scores: bool):
    assert load_config(PPOConfig, "ppo_trainer", options.split()).scores_before_update is scores


@pytest.mark.parametrize(
    ("options", "in_update"),
    [
        ("", True),
        ("actor.tis_level=sequence model.lora.rank=4 algorithm=gae", True),
        ("actor.bypass_mode=true", False),
        ("actor.tis_level=token actor.tis_normalize=true", False),
        ("calculator.metric_indices_add=[avg_logits_entropy]", False),
        ("calculator.source=actor", False),
        (f"{VETO}=1e-4", False),
        ("algorithm=optimal_token_baseline", False),
        ("algorithm.use_kl_in_reward=true", False),
        ("algorithm=gae algorithm.use_pf_ppo=true", False),
        ("model.lora.rank=4 model.lora.dropout=0.1", False),
    ],
)
def test_an_update_scores_its_responses_where_nothing_needs_the_scores_before(options: str, in_update: bool):
    assert load_config(PPOConfig, "ppo_trainer", options.split()).scores_in_update is in_update


LONG_NAME = "a" * 300


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("file/run", "/file is a file; name a folder that can be made and written"),
        (LONG_NAME, "File name too long; name a folder that can be made and written"),
        ("  ", "is empty; name a folder that can be made and written"),
        ("/proc/1/run", None),
    ],
)
def test_a_folder_that_cannot_be_made_is_found_at_once(tmp_path: Path, folder: str, message: str | None):
    (tmp_path / "file").write_text("")
    path = folder if folder.startswith((" ", "/")) else str(tmp_path / folder)
    if message is None:  # nobody can write there, but on some systems only trying shows it, as the lock of the run does
        with pytest.raises(ConfigError, match="cannot be written"):
            require_folder("trainer.default_local_dir", path)
            with run_lock(Path(path)):
                pass
        return
    with pytest.raises(ConfigError) as caught:
        require_folder("trainer.default_local_dir", path)
    assert str(caught.value).startswith("trainer.default_local_dir=") and str(caught.value).endswith(message)
    assert not (tmp_path / LONG_NAME[:5]).exists()


def test_text_with_nul_is_refused():
    tree = compose_config(PPOConfig, "ppo_trainer")
    tree.trainer.default_local_dir = "a\0b"
    with pytest.raises(ConfigError, match="must not hold the character NUL"):
        parse_config(PPOConfig, tree)
