"""Undefined combinations are refused in one sentence that names the settings and says what to change."""

from dataclasses import fields, is_dataclass
from typing import Optional, get_type_hints

import pytest

from rlframe.config import AlgorithmConfig, ConfigError
from rlframe.losses.checks import check_algorithm
from rlframe.losses.objective import PolicyRules
from rlframe.losses.policy import PolicyLoss
from rlframe.losses.registry import POLICY_LOSSES
from trainer.settings.checks import check
from trainer.settings.config import Config


def config_with(**settings) -> Config:
    """A valid job with some settings changed; ``__`` stands for the dot."""
    config = Config()
    config.model.builder = "tiny"
    for key, value in settings.items():
        *sections, name = key.split("__")
        part = config
        for section in sections:
            part = getattr(part, section)
        assert hasattr(part, name), key
        setattr(part, name, value)
    return config


def refusal(**settings) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config_with(**settings))
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", '".', ").")), message
    return message


def test_the_schema_defaults_pass():
    check(config_with())


CENTRED = {"algorithm__score_centering": True}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({**CENTRED, "algorithm__rollout_is": "sequence"}, ["algorithm.score_centering", "algorithm.rollout_is=sequence"]),
        ({**CENTRED, "algorithm__policy_loss": "ppo_clip"}, ["algorithm.score_centering", "algorithm.policy_loss=ppo_clip"]),
        ({**CENTRED, "rollout__top_p": 0.9}, ["rollout.top_p=0.9 makes", "mass that was kept", "set rollout.top_p=1"]),
        ({"rollout__top_p": 0.9}, ["rollout.top_p=0.9 makes", "mass that was kept", "set rollout.top_p=1"]),
        ({"rollout__top_p": 0.99, "rollout__engine": "torch"}, ["rollout.top_p=0.99 makes"]),
        ({"rollout__engine_args": {"logits_processors": ["m:Cut"]}}, ["rollout.engine_args.logits_processors"]),
        ({"model__dtype": "float16"}, ["model.dtype=float16 is not known", "float32, bfloat16."]),
        ({"rollout__dtype": "float8"}, ["rollout.dtype=float8 is not known", "float32, bfloat16, float16."]),
        ({"reorder_window": 300, "max_staleness": 2}, ["reorder_window=300", "256", "max_staleness=2"]),
        ({"rollout__segment_tokens": 0}, ["rollout.segment_tokens=0 is out of range", "or null"]),
        (
            {"rollout__segment_tokens": 9, "algorithm__advantage": "running_mean"},
            ["rollout.segment_tokens=9", "algorithm.advantage=running_mean", "no critic"],
        ),
        (
            {"rollout__segment_tokens": 9, "algorithm__rollouts_per_prompt": 2},
            ["rollout.segment_tokens=9", "algorithm.rollouts_per_prompt=2"],
        ),
        ({"reorder_window": 1, "max_staleness": 0}, ["reorder_window=1", "max_staleness=0"]),
        ({"rollout__weight_channel": "nccl", "rollout__engine": "torch"}, ["weight_channel=nccl", "rollout.engine=torch"]),
        ({"rollout__weight_channel": "nccl"}, ["weight_channel=nccl", "actor.mode=lora"]),
        ({"rollout__weight_channel": "nccl", "actor__mode": "full"}, ["weight_channel=nccl", "actor.gpus=0", "rollout.gpus=0"]),
        ({"rollout__top_k": 20}, ["rollout.top_k=20 makes", "mass that was kept", "set rollout.top_k=0"]),
        ({"rollout__engine_args": {"max_model_len": 9}}, ["rollout.engine_args.max_model_len", "rollout.max_model_len"]),
        ({"rollout__engine_args": {"logprobs_mode": "raw_logprobs"}}, ["rollout.engine_args.logprobs_mode"]),
        ({**CENTRED, "rollout__head_size": 0}, ["algorithm.score_centering", "rollout.head_size=0"]),
        (
            {"algorithm__rollout_is": "token", "algorithm__policy_loss": "dis"},
            ["algorithm.rollout_is", "algorithm.policy_loss"],
        ),
        ({"algorithm__rollout_is": "sequence", "algorithm__policy_loss": "ppo_clip"}, ["twice"]),
        ({"algorithm__rollout_is": "token", "algorithm__policy_loss": "cispo"}, ["twice"]),
        (
            {"algorithm__policy_loss": "dis", "algorithm__clip_low": 1.0},
            ["algorithm.clip_low=1.0", "algorithm.policy_loss=dis"],
        ),
        ({"algorithm__rollout_rs": "token_k1"}, ["algorithm.rollout_rs=token_k1", "algorithm.rollout_rs_threshold is null"]),
        ({"algorithm__rollout_rs_threshold": 2.0}, ["algorithm.rollout_rs_threshold=2.0", "algorithm.rollout_rs=null"]),
        (
            {"algorithm__rollout_rs": "seq_mean_k3", "algorithm__rollout_rs_threshold": [0.1, 0.2]},
            ["algorithm.rollout_rs_threshold", "algorithm.rollout_rs=seq_mean_k3"],
        ),
        ({"algorithm__advantage": "group"}, ["algorithm.advantage=group", "algorithm.rollouts_per_prompt=1"]),
        ({"algorithm__rollouts_per_prompt": 7}, ["algorithm.rollouts_per_prompt=7", "batch_size=128"]),
        ({"algorithm__normalize_advantages": True}, ["algorithm.normalize_advantages", "algorithm.advantage=gae"]),
        ({"actor__mode": "full", "rollout__weight_sync": "adapter"}, ["rollout.weight_sync=adapter", "actor.mode=full"]),
        ({"actor__mode": "full", "rollout__weight_sync": "merged"}, ["rollout.weight_sync=merged", "actor.mode=full"]),
        ({"rollout__weight_sync": "full"}, ["rollout.weight_sync=full", "actor.mode=lora"]),
        ({"rollout__weight_sync": "merged", "rollout__quantize": "int4"}, ["rollout.weight_sync=merged", "rollout.quantize"]),
        ({"rollout__weight_sync": "adapter", "rollout__weight_noise": 0.1}, ["rollout.weight_sync=adapter", "weight_noise"]),
        ({"critic__ensemble": 2, "critic__mode": "full"}, ["critic.ensemble=2", "critic.mode=full"]),
        ({"critic__warmup_steps": 100}, ["critic.warmup_steps=100", "steps=100"]),
        ({"critic__lora__targets": ["q_proj", "lm_head"]}, ["critic.lora.targets", "lm_head"]),
        ({"rollout__max_new_tokens": 1024}, ["rollout.max_new_tokens=1024", "rollout.max_model_len=1024"]),
        ({"model__path": "/x"}, ["model.path", "model.builder"]),
        ({"model__builder": None}, ["model.path", "model.builder"]),
        ({"task__name": "jsonl", "task__reward": "m:f"}, ["task.train", "task.name=jsonl"]),
        ({"task__name": "parquet", "task__train": "p"}, ["task.reward", "task.name=parquet"]),
        ({"task__train": "p.jsonl"}, ["task.train", "task.name=arithmetic"]),
        ({"task__eval": "p.jsonl"}, ["task.eval", "task.name=arithmetic"]),
        ({"task__on_reward_failure": "ignore"}, ["task.on_reward_failure=ignore", "raise, drop, zero"]),
        ({"task__last_assistant": "keep"}, ["task.last_assistant=keep", "refuse, drop, continue"]),
        ({"task__stop": [True]}, ["task.stop has True", "its number"]),
        ({"task__stop": [""]}, ["task.stop has ''"]),
        ({"task__stop": [-1]}, ["task.stop has -1"]),
        ({"eval__size": 0}, ["eval.size=0", "or null"]),
        ({"task__reward_workers": 0}, ["task.reward_workers=0"]),
        ({"task__reward_timeout_s": 0.0}, ["task.reward_timeout_s=0.0"]),
        ({"task__reward_memory_mb": 3}, ["task.reward_memory_mb=3"]),
        ({"cluster__device": "cuda"}, ["cluster.device=cuda", "actor.gpus=0"]),
        (
            {"model__attn_implementation": "flash_attention_2", "model__dtype": "bfloat16"},
            ["model.attn_implementation=flash_attention_2", "actor.gpus=0", "set actor.gpus=1"],
        ),
        (
            {"model__attn_implementation": "flash_attention_2", "model__dtype": "float32", "actor__gpus": 1.0},
            ["model.attn_implementation=flash_attention_2", "model.dtype=float32", "model.dtype=bfloat16"],
        ),
        ({"cluster__device": "cpu", "actor__gpus": 1.0}, ["cluster.device=cpu", "actor.gpus=1"]),
        (
            {"rollout__engine": "torch", "rollout__tensor_parallel_size": 2},
            ["rollout.tensor_parallel_size=2", "rollout.engine=torch"],
        ),
        ({"rollout__gpus": 1.0, "rollout__tensor_parallel_size": 2}, ["rollout.gpus=1", "rollout.tensor_parallel_size=2"]),
        ({"actor__optim__schedule": "cosine"}, ["actor.optim.schedule=cosine", "actor.optim.total_steps"]),
        (
            {"critic__optim__warmup_steps": 5, "critic__optim__total_steps": 5},
            ["critic.optim.total_steps", "critic.optim.warmup_steps=5"],
        ),
    ],
)
def test_a_combination_that_is_not_defined_names_both_settings(settings, named):
    message = refusal(**settings)
    for part in named:
        assert part in message, message


def test_engines_may_be_narrower_than_the_trainer():
    check(config_with(rollout__dtype="float16", model__dtype="bfloat16"))


def test_a_loss_that_does_not_say_how_its_scores_are_centred_is_refused(monkeypatch):
    """Whatever it is called: a check that lists names would let it through, and centering would do nothing."""

    class Squared:
        level, centering = "token", None

        def __call__(self, logprobs, sampler_logprobs, advantages):
            raise NotImplementedError

    monkeypatch.setitem(POLICY_LOSSES, "squared", Squared)
    algorithm = AlgorithmConfig(policy_loss="squared", score_centering=True)
    for refuse in (check_algorithm, PolicyRules.of, PolicyLoss):
        with pytest.raises(ConfigError, match=r"policy_loss=squared has none; choose .*reinforce, dis, cispo, or set"):
            refuse(algorithm)
    PolicyRules.of(AlgorithmConfig(policy_loss="squared"))


@pytest.mark.parametrize("loss", ["reinforce", "dis", "cispo"])
def test_score_centering_goes_with_every_weight_of_one_token(loss):
    check(config_with(algorithm__score_centering=True, algorithm__policy_loss=loss))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 0),
        ("batch_size", 0),
        ("max_staleness", -1),
        ("seed", -1),
        ("algorithm__policy_loss", "ppo"),
        ("algorithm__rollout_is", "tokens"),
        ("algorithm__rollout_is_threshold", "a_b"),
        ("algorithm__rollout_is_threshold", [5, 0.5]),
        ("algorithm__rollout_is_threshold", [1, 2, 3]),
        ("algorithm__rollout_is_threshold", []),
        ("algorithm__rollout_is_threshold", ["a", 2]),
        ("algorithm__rollout_is_threshold", None),
        ("algorithm__rollout_is_threshold", -1.0),
        ("algorithm__rollout_is_threshold", 0),
        ("algorithm__rollout_is_threshold", "1_2_3"),
        ("algorithm__rollout_is_threshold", float("nan")),
        ("algorithm__advantage", "grpo"),
        ("algorithm__clip_low", -0.1),
        ("algorithm__clip_dual", 1.0),
        ("algorithm__gamma", 1.1),
        ("algorithm__lambda_critic", -0.1),
        ("algorithm__lambda_policy", "adaptve"),
        ("algorithm__lambda_policy", 2.0),
        ("algorithm__lambda_alpha", 0.0),
        ("algorithm__running_mean_decay", 1.0),
        ("rollout__engine", "sgl"),
        ("rollout__temperature", 0.0),
        ("rollout__temperature", float("nan")),
        ("rollout__top_p", 0.0),
        ("rollout__top_p", 1.1),
        ("rollout__workers", 0),
        ("rollout__weight_sync", "delta"),
        ("rollout__quantize", "int2"),
        ("rollout__dtype", "fp32"),
        ("rollout__timeout_s", 0.0),
        ("model__dtype", "float64"),
        ("actor__ranks", 0),
        ("actor__mode", "qlora"),
        ("actor__lora__rank", 0),
        ("actor__lora__targets", []),
        ("actor__lora__targets", 3),
        ("actor__frozen_patterns", [""]),
        ("actor__optim__lr", -1e-6),
        ("actor__optim__lr", float("nan")),
        ("actor__optim__betas", [0.9]),
        ("actor__optim__betas", [0.9, 1.0]),
        ("actor__optim__eps", 0.0),
        ("actor__optim__max_grad_norm", 0.0),
        ("actor__optim__weight_decay", -0.1),
        ("actor__optim__schedule", "cosinus"),
        ("critic__updates_per_step", 0),
        ("critic__ensemble", 0),
        ("critic__warmup_steps", -1),
        ("critic__optim__lr", -1.0),
        ("eval__size", 0),
        ("checkpoint__keep_last", 0),
        ("log__wandb", "on"),
        ("cluster__device", "tpu"),
    ],
)
def test_a_value_out_of_range_names_its_setting(key, value):
    assert key.replace("__", ".") in refusal(**{key: value})


def test_every_setting_of_the_schema_is_documented():
    import ast
    import inspect

    import trainer.settings.config as module

    def undocumented(cls):
        body = ast.parse(inspect.getsource(cls)).body[0].body
        for node, after in zip(body, [*body[1:], None], strict=True):
            section = isinstance(node, ast.AnnAssign) and is_dataclass(getattr(module, ast.unparse(node.annotation), None))
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(node, ast.AnnAssign) and not section and not documented:
                yield f"{cls.__name__}.{node.target.id}"

    classes = [c for c in vars(module).values() if is_dataclass(c)]
    assert len(classes) > 10 and all(fields(c) for c in classes)
    assert [name for c in classes for name in undocumented(c)] == []


def test_every_number_and_choice_of_the_schema_has_a_rule_or_a_reason():
    """A new number without a range is a decision, so it is named here."""
    free = {
        "rollout.temperature",  # a sentence of its own
        "algorithm.clip_dual",  # with the losses
        "actor.lora.alpha",
        "critic.lora.alpha",
        "server.lora_alpha",
        "actor.optim.total_steps",  # against warmup_steps
        "critic.optim.total_steps",
        "critic.clip_range",
    }

    def numbers(section, prefix=""):
        hints = get_type_hints(type(section))
        for field in fields(section):
            value = getattr(section, field.name)
            if is_dataclass(value):
                yield from numbers(value, f"{prefix}{field.name}.")
            elif hints[field.name] in (int, float, Optional[int], Optional[float]) and "rule" not in field.metadata:
                yield prefix + field.name

    assert set(numbers(Config())) == free
