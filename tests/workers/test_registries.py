"""Engines and environments of anybody's: a registry line or an import path is all that the rest of rlframe needs."""

import subprocess
import sys

import pytest

from rlframe.config import ConfigError
from trainer.cluster.memory import estimate, read_shape
from trainer.cluster.placement import plan
from trainer.settings.checks import check
from trainer.settings.compose import compose
from trainer.settings.config import Config
from workers.engines.checks import check_installed
from workers.engines.registry import ENGINES, check_serves_adapters, make_engine
from workers.engines.spec import EngineSpec
from workers.environments.arithmetic import Arithmetic
from workers.environments.registry import ENVIRONMENTS
from workers.environments.task_checks import eval_size

HERE = "tests.workers.test_registries"


class Narrow(EngineSpec):
    title = "the narrow engine"
    package = "no_such_package"
    install = "ask its author"
    dtypes = ("bfloat16",)
    weight_syncs = ("full",)
    settings = ("rollout.server_urls",)
    owned = {"size": "rollout.max_model_len decides"}  # noqa: RUF012

    def make(self, config, model_path, index):
        return config.rollout.engine_args, model_path, index

    def check(self, config):
        if config.rollout.on_update == "abort":
            raise ConfigError("rollout.on_update=abort is too rude; set rollout.on_update=keep.")

    def reserved_cache(self, rollout):
        return 3 * 2.0**30


class Quiet(Arithmetic):
    """An environment that reads no setting but one."""

    settings = ("stop",)


NARROW = Narrow()


def narrow(*overrides: str) -> Config:
    return compose([f"rollout.engine={HERE}:NARROW", "actor=full", "rollout.dtype=bfloat16", *overrides])


def test_an_engine_at_an_import_path_is_built_with_its_arguments():
    config = narrow("rollout.engine_args={a: 1}", "rollout.server_urls=[x]")
    assert make_engine(config, "model", 3) == ({"a": 1}, "model", 3)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["rollout.dtype=float32"], "rollout.dtype=float32 is not served by rollout.engine=.*choose one of bfloat16"),
        (["actor=lora"], "does not load weights of rollout.weight_sync=merged; choose one of full"),
        (["rollout.tensor_parallel_size=2"], "rollout.tensor_parallel_size=2 is not defined for rollout.engine="),
        (["rollout.weight_channel=nccl"], "rollout.weight_channel=nccl is that of vllm, .*set rollout.weight_channel=ray"),
        (["rollout.engine_args={size: 1}"], "rollout.engine_args.size would overrule what rollout.max_model_len decides"),
        (["rollout.on_update=abort"], "too rude"),
        (["rollout.weights_dir=/x"], "rollout.weights_dir has no effect with rollout.engine="),
    ],
)
def test_what_its_spec_does_not_say_that_it_can_is_refused(overrides, named):
    with pytest.raises(ConfigError, match=named):
        narrow(*overrides)


def test_the_machine_the_server_and_the_memory_estimate_ask_the_spec_too():
    with pytest.raises(ConfigError, match=r"needs the package no_such_package, which is not installed here; ask its author"):
        check_installed(narrow().rollout)
    with pytest.raises(ConfigError, match="cannot serve adapters at run time; choose vllm or torch"):
        check_serves_adapters(narrow())


def test_the_memory_estimate_has_the_cache_that_the_engine_reserves(tmp_path):
    from tests.support.rollouts import model_folder

    config = narrow()
    text = estimate(config, plan(config), read_shape(model_folder(tmp_path)))
    assert "3.0 GiB  KV cache that the narrow engine reserves" in text


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("vlm", "rollout.engine=vlm is not known; choose one of .*torch.*, or module:ENGINE of your own"),
        (
            "no_such_module:ENGINE",
            "rollout.engine=no_such_module:ENGINE cannot be imported: ModuleNotFoundError: No module",
        ),
        (f"{HERE}:nothing", "names nothing: .*test_registries.py has no 'nothing'"),
        (f"{HERE}:Narrow", "must be an object of a class derived from workers.engines.spec.EngineSpec"),
    ],
)
def test_what_is_no_engine_is_refused(name, named):
    config = Config()
    config.model.builder, config.rollout.engine = "tiny", name
    with pytest.raises(ConfigError, match=named):
        check(config)


def test_asking_every_spec_imports_no_engine():
    program = f"""
import sys
from workers.engines.registry import engine_spec
for name in {list(ENGINES)}:
    engine_spec(name).check, engine_spec(name).owned
print([name for name in ("torch", "vllm", "sglang", "transformers") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_built_in_environment_is_its_class_and_a_line(monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "quiet", f"{HERE}:Quiet")
    assert eval_size(compose(["task.name=quiet", "task.stop=['=']"])) == 256
    for setting, reason in (
        ("task.prompt_key=x", "has no effect with task.name=quiet, which makes its own prompts"),
        ("task.reward_workers=3", "has no effect with task.name=quiet, which rewards answers itself"),
        ("task.template_args={a: 1}", "task.template_args.* has no effect with task.name=quiet"),
        ("task.train=x.jsonl", "task.train=x.jsonl is not used by task.name=quiet; choose task=jsonl or parquet"),
    ):
        with pytest.raises(ConfigError, match=reason):
            compose(["task.name=quiet", setting])
    with pytest.raises(ConfigError, match=r"task\.name=quite is not an environment; did you mean quiet"):
        compose(["task.name=quite"])
