"""What a job asks of Ray, and what it needs in memory, against models that are really built."""

import itertools
import socket
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from rlframe.config import ConfigError, LoraConfig
from trainer.cluster import placement
from trainer.cluster.memory import estimate, lora_parameters, read_shape
from trainer.cluster.placement import critic_names, plan
from trainer.cluster.ray_cluster import start_ray
from trainer.settings.config import Config


def job(actor: str = "lora", critic: str = "lora", **algorithm) -> Config:
    config = Config()
    config.model.builder = "tiny"
    config.actor.mode, config.critic.mode = actor, critic
    for name, value in algorithm.items():
        setattr(config.algorithm, name, value)
    return config


def backbones(config: Config) -> list[tuple[bool, tuple[str, ...]]]:
    return [(b.trainable, b.sessions) for b in plan(config).backbones]


def test_a_lora_actor_and_its_critics_share_one_frozen_backbone():
    config = job()
    config.critic.ensemble = 3
    assert backbones(config) == [(False, ("actor", "critic_0", "critic_1", "critic_2"))]


def test_a_full_weights_actor_leaves_the_critics_a_frozen_backbone_of_their_own():
    assert backbones(job(actor="full")) == [(True, ("actor",)), (False, ("critic_0",))]


def test_a_full_weights_critic_has_its_own_backbone():
    assert backbones(job(critic="full")) == [(False, ("actor",)), (True, ("critic_0",))]


@pytest.mark.parametrize(
    ("actor", "lines"),
    [
        ("lora", ["backbone 0 (frozen, whole on its rank): actor, critic_0"]),
        (
            "full",
            ["backbone 0 (all weights train, whole on its rank): actor", "backbone 1 (frozen, whole on its rank): critic_0"],
        ),
    ],
)
def test_the_description_shows_which_sessions_share_a_backbone(actor, lines):
    shown = [line.strip() for line in plan(job(actor=actor)).describe().splitlines()]
    assert [line for line in shown if line.startswith("backbone")] == lines


def test_without_gae_there_is_no_critic():
    config = job(advantage="running_mean")
    assert backbones(config) == [(False, ("actor",))]
    assert critic_names(config) == ()


def test_an_advantage_of_ones_own_says_whether_there_is_a_critic(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "placed_advantages.py").write_text(
        "from rlframe.advantages.gae import GAE\nclass Valued(GAE): pass\nclass Plain(GAE): needs_critic = False\n"
    )
    valued, plain = (job(advantage=f"placed_advantages:{name}") for name in ("Valued", "Plain"))
    assert backbones(valued) == [(False, ("actor", "critic_0"))] and critic_names(valued) == ("critic_0",)
    assert backbones(plain) == [(False, ("actor",))] and critic_names(plain) == ()


def test_the_request_adds_up_over_learner_and_rollout_workers():
    config = job()
    config.actor.ranks, config.actor.cpus = 3, 2.0
    config.rollout.workers, config.rollout.cpus = 2, 0.5
    assert (plan(config).cpus, plan(config).gpus) == (7.0, 0.0)


def test_a_cluster_that_is_too_small_is_refused_with_what_is_asked_and_what_is_there():
    config = job()
    config.cluster.address = "auto"
    config.actor.ranks, config.actor.gpus, config.rollout.gpus = 4, 1.0, 2.0
    asked = plan(config)
    asked.check_cluster({"a": {"CPU": 5.0, "GPU": 6.0}})
    with pytest.raises(ConfigError) as caught:
        asked.check_cluster({"a": {"CPU": 5.0, "GPU": 3.0}, "b": {"GPU": 2.0}})
    assert str(caught.value) == (
        "The job asks for 6 GPUs (actor.ranks=4 x actor.gpus=1 and rollout.workers=1 x rollout.gpus=2), but the cluster at "
        "auto has 5; lower one of these settings."
    )
    with pytest.raises(ConfigError, match=r"asks for 5 CPUs .* has 4"):
        asked.check_cluster({"a": {"CPU": 4.0, "GPU": 6.0}})


def test_an_engine_that_no_node_can_hold_is_refused_although_the_cluster_has_enough_in_all():
    config = job()
    config.cluster.address = "auto"
    config.rollout.gpus, config.rollout.tensor_parallel_size = 4.0, 4
    asked = plan(config)
    with pytest.raises(ConfigError) as caught:
        asked.check_cluster({"a": {"CPU": 8.0, "GPU": 2.0}, "b": {"CPU": 8.0, "GPU": 2.0}})
    assert str(caught.value) == (
        "1 x learner (1 CPU each) and 1 x rollout (1 CPU + 4 GPU each) cannot be placed on the nodes of the cluster at auto, "
        "since an actor does not span nodes (a: 8 CPU, 2 GPU; b: 8 CPU, 2 GPU); ask for smaller actors or fewer."
    )
    asked.check_cluster({"a": {"CPU": 1.0}, "b": {"CPU": 1.0, "GPU": 4.0}})


def test_one_and_a_half_gpus_are_refused_and_half_a_gpu_is_not():
    config = job()
    config.cluster.address = "auto"
    config.rollout.gpus = 0.5
    assert plan(config).gpus == 0.5
    config.rollout.gpus = 1.5
    with pytest.raises(ConfigError, match=r"^rollout\.gpus=1\.5 is not possible"):
        plan(config)


def test_parts_of_gpus_that_do_not_pack_are_refused_before_ray_starts(monkeypatch):
    monkeypatch.setattr(placement, "local_gpus", lambda: 2)
    config = job()
    config.rollout.workers, config.rollout.gpus = 3, 0.6
    with pytest.raises(ConfigError) as caught:
        plan(config)
    assert str(caught.value) == (
        "1 x learner (1 CPU each) and 3 x rollout (1 CPU + 0.6 GPU each) cannot be placed on the 2 GPUs of this machine, "
        "since a part of a GPU does not span two GPUs; ask for other parts, or for fewer."
    )
    config.rollout.gpus = 0.5
    assert plan(config).gpus == 1.5
    config.actor.gpus, config.rollout.gpus, config.rollout.workers = 0.4, 0.6, 2
    assert plan(config).gpus == 1.6, "0.4 beside 0.6, and 0.6"
    config.actor.gpus = 1.0
    with pytest.raises(ConfigError, match=r"asks for 2\.2 GPUs .* this machine has 2"):
        plan(config)


def every_way(a: int, b: int, nodes: int):
    """All ways to put ``a`` and ``b`` equal things on ``nodes``."""
    for where in itertools.product(range(nodes), repeat=a + b):
        yield where[:a], where[a:]


def on_gpus(sizes: list[int], left: list[int]) -> bool:
    """Whether things of ``sizes`` fit on GPUs of which so much is ``left`` (both in tenths), by trying every way."""
    if not sizes:
        return True
    first, *rest = sizes
    if first % 10 == 0:
        free, whole = [i for i, have in enumerate(left) if have == 10], first // 10
        ways = itertools.combinations(free, whole)
        return any(on_gpus(rest, [0 if i in way else have for i, have in enumerate(left)]) for way in ways)
    ways = (i for i, have in enumerate(left) if have >= first)
    return any(on_gpus(rest, [have - first * (i == n) for n, have in enumerate(left)]) for i in ways)


@given(
    counts=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    sizes=st.tuples(*[st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.3, 0.4, 0.6, 1.0, 2.0]))] * 2),
    nodes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_a_request_is_refused_exactly_when_no_way_to_place_it_exists(counts, sizes, nodes):
    """Against all ways, tried one after the other."""
    config = job()
    config.cluster.address = "auto"
    (config.actor.ranks, config.rollout.workers), ((config.actor.cpus, _), (config.rollout.cpus, _)) = counts, sizes
    learner, rollout = plan(config).groups
    groups = (replace(learner, gpus=sizes[0][1]), replace(rollout, gpus=sizes[1][1]))
    asked = replace(plan(config), groups=groups)

    def holds(ways) -> bool:
        for n, (cpus, gpus) in enumerate(nodes):
            here = [size for size, way in zip(sizes, ways, strict=True) for where in way if where == n]
            if sum(size[0] for size in here) > cpus or not on_gpus([round(10 * size[1]) for size in here], [10] * gpus):
                return False
        return True

    possible = any(holds(ways) for ways in every_way(*counts, len(nodes)))
    try:
        asked.check_cluster({str(n): {"CPU": cpus, "GPU": gpus} for n, (cpus, gpus) in enumerate(nodes)})
    except ConfigError:
        assert not possible
    else:
        assert possible


@pytest.mark.parametrize(
    ("setting", "variable", "joined"),
    [
        (None, None, None),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),
        ("auto", "10.0.0.1:6379", "auto"),
        ("local", "10.0.0.1:6379", None),
        (None, "local", None),
    ],
)
def test_the_cluster_of_the_setting_wins_over_that_of_the_environment(setting, variable, joined, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    config = job()
    config.cluster.address = setting
    assert plan(config).address == joined


def test_the_address_of_a_dashboard_is_not_that_of_a_head(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS=http://head:8265 is not the address of a Ray head: .*rlframe submit"):
        plan(job())


def test_a_head_that_is_not_there_is_refused_at_once():
    config = job()
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        config.cluster.address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"^No Ray cluster answers at 127\.0\.0\.1"):
            start_ray(plan(config))


def test_a_local_job_is_refused_more_gpus_than_the_machine_has_but_not_more_cpus(monkeypatch):
    monkeypatch.setattr(placement, "local_gpus", lambda: 1)
    config = job()
    config.actor.cpus = 1000.0
    plan(config)
    config.actor.gpus = 2.0
    with pytest.raises(ConfigError, match="this machine has 1"):
        plan(config)


TINY = {"vocab_size": 70, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2}
MODELS = {
    "tied": Qwen3Config(**TINY, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True),
    "untied": LlamaConfig(**TINY, num_key_value_heads=2, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(
        **TINY, num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_as_the_built_model_has_them(name, tmp_path):
    MODELS[name].save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    model = AutoModelForCausalLM.from_config(MODELS[name])
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.largest_block == sum(p.numel() for p in model.model.layers[0].parameters())


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], r".*\.(gate|up)_proj"])
def test_adapter_parameters_are_counted_as_peft_makes_them(targets, tmp_path):
    MODELS["tied"].save_pretrained(tmp_path)
    counted = lora_parameters(read_shape(str(tmp_path)), LoraConfig(rank=5, targets=targets))
    adapter = get_peft_model(AutoModelForCausalLM.from_config(MODELS["tied"]), PeftLoraConfig(r=5, target_modules=targets))
    assert counted == sum(p.numel() for p in adapter.parameters() if p.requires_grad)


def test_the_kv_cache_is_what_a_forward_pass_leaves(tmp_path):
    MODELS["tied"].save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(MODELS["tied"])
    with torch.no_grad():
        cache = model(torch.zeros(1, 7, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert read_shape(str(tmp_path)).kv * 7 == held


def test_activations_are_of_the_size_that_autograd_saves(tmp_path):
    """Within a factor of two, which is what an estimate before any run can promise."""
    config = MODELS["tied"]
    config.save_pretrained(tmp_path)
    shape, tokens = read_shape(str(tmp_path)), 512
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").model
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    estimated = tokens * shape.layers * shape.activations * 4
    assert 0.5 < estimated / sum(saved.values()) < 2
    del output


def test_the_estimate_names_every_session_and_shrinks_with_ranks(tmp_path):
    MODELS["untied"].save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    config = job(actor="full")
    text = estimate(config, plan(config), shape)
    for part in ("actor: ", "critic_0: ", "frozen", "activations", "KV cache", "each learner", "each rollout", "all processes"):
        assert part in text
    assert f"actor: {shape.parameters:,} trained parameters" in text
