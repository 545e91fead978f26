"""One schema for a whole job; the YAML groups under ``configs/`` hold only what differs from it.

Plain dataclasses, so that the library can be used without Hydra. Composition (Hydra) and the checks across settings live
in `trainer.settings.compose` and `rlframe.config.checks`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Optional

MODEL_DTYPES = ("float32", "bfloat16")
"""What the trainer computes in; float16 would need loss scaling."""
ENGINE_DTYPES = (*MODEL_DTYPES, "float16")
"""What an engine's weights may be, and what weights travel as."""


class ConfigError(ValueError):
    """A setting, or a pair of settings, that is refused; the message is one sentence for the user."""


@dataclass
class ModelConfig:
    """The base model that every role starts from."""

    name: str = "tiny"
    """What it is called in logs."""
    builder: Optional[str] = None
    """``tiny`` or ``smollm2``: made (or unpacked) once into the cache; null: ``path`` is used as it is."""
    path: Optional[str] = None
    """A local Hugging Face folder (weights, config, tokenizer)."""
    build: dict[str, Any] = field(default_factory=dict)
    """Arguments of the builder."""
    dtype: str = "float32"
    """``float32`` or ``bfloat16``, of the trainer's forward and backward; master weights and optimiser are always float32."""
    attn_implementation: str = "sdpa"
    """Attention kernel of transformers."""
    trust_remote_code: bool = False
    """Run code that a model folder ships."""


@dataclass
class TaskConfig:
    """Where prompts come from and how answers are rewarded."""

    name: str = "arithmetic"
    """Name of the environment: arithmetic, countdown, wordle, reasoning_gym, jsonl, parquet; or ``module:factory``."""
    train: Optional[str] = None
    """File of training prompts (jsonl, parquet)."""
    eval: Optional[str] = None
    """File of held-out prompts, used whole where ``eval.size`` is null; without one, problems are held out from ``train``."""
    reward: Optional[str] = None
    """Reward function of a prompt file: ``module:function`` (the current directory is searched, too), or ``math``."""
    reward_workers: int = 2
    """Processes that run the reward function, for each rollout worker."""
    reward_timeout_s: float = 30.0
    """Longest time that one call of the reward function may take."""
    reward_startup_timeout_s: float = 60.0
    """Longest time that importing the reward function may take."""
    reward_memory_mb: Optional[int] = None
    """Most memory that a process of the reward function may allocate; null: no limit."""
    on_reward_failure: str = "raise"
    """When the reward function fails, hangs, crashes or returns no finite number: ``raise`` ends the run, ``drop`` leaves
    the rollout out (0 in an evaluation), ``zero`` rewards it with 0."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a string, or chat messages (a list, or one written as JSON)."""
    tools_key: Optional[str] = "tools"
    """Column of a chat's tools (JSON schemas), which the chat template renders, where there is one; null: none are rendered."""
    chat_template: Optional[bool] = None
    """Render string prompts through the tokenizer's chat template; null: only chat messages are rendered."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as ``enable_thinking: false``."""
    last_assistant: str = "refuse"
    """Chats whose last message is the assistant's: ``refuse`` them, ``drop`` that message (the row keeps it as ``reference``),
    or ``continue`` it."""
    stop: list[Any] = field(default_factory=list)
    """More tokens that end an answer, by text or number, beside those of the tokenizer, the model's files and the end of a turn
    in the chat template."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment."""


@dataclass
class AlgorithmConfig:
    """A point in the space of algorithms; a preset is a named point."""

    description: str = ""
    """One line for ``rlframe presets``."""
    policy_loss: str = "reinforce"
    """``reinforce``, ``dis``, ``ppo_clip``, ``cispo``, ``gspo``, ``importance_sampling``, ``dro``; or ``module:Class`` of your
    own (the current directory is searched, too)."""
    loss_args: dict[str, Any] = field(default_factory=dict)
    """Settings of a loss of your own, by the names of its constructor; of dro: ``beta`` (0.05)."""
    clip_low: float = 0.2
    """Lower clip: the ratio band of dis, ppo_clip, cispo and gspo starts at 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip: the ratio band ends at 1 + clip_high."""
    clip_dual: Optional[float] = None
    """ppo_clip: with a negative advantage the ratio counts at most this much (dual clip; above 1); null: no bound."""
    rollout_is: Optional[str] = None
    """Importance weight of trainer against sampler: null, ``token`` or ``sequence``."""
    rollout_is_threshold: Any = 2.0
    """A number c (truncate at c) or ``"lo_hi"`` (zero outside the band)."""
    rollout_rs: Optional[str] = None
    """Rejection: ``token_k1``.. ``seq_max_k3``, or null."""
    rollout_rs_threshold: Any = None
    """A number (upper bound; k1: the ratio band 1/c to c) or, for k1, ``"lo_hi"``."""
    score_centering: bool = False
    """Subtract the sampler's expected score from every score; needs heads from the rollout workers."""
    advantage: str = "gae"
    """``gae`` (critic), ``running_mean``, ``group`` or ``none``."""
    rollouts_per_prompt: int = 1
    """Rollouts of one prompt; above 1 for ``group``."""
    normalize_advantages: bool = False
    """``group``: divide by the standard deviation of the group."""
    running_mean_decay: float = 0.95
    """``running_mean``: weight of the past at every step."""
    gamma: float = 1.0
    """Discount per action token."""
    lambda_critic: float = 1.0
    """GAE lambda of the critic's targets."""
    lambda_policy: Any = "adaptive"
    """GAE lambda of the policy's advantages: a number, or ``adaptive`` for 1 - 1 / (lambda_alpha * length)."""
    lambda_alpha: float = 1.5
    """alpha of the adaptive lambda."""


@dataclass
class RolloutConfig:
    """The samplers."""

    engine: str = "vllm"
    """``vllm``, ``sglang`` or ``torch``."""
    workers: int = 1
    """Rollout workers, each one Ray actor that owns one engine."""
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: float = 1.0
    """Nucleus mass; only 1, since the tokens that a smaller one keeps do not travel with a trajectory."""
    top_k: int = 0
    """Sample among the k likeliest tokens only; only 0, which means all, for the same reason."""
    head_size: int = 128
    """k of the top-k log-probabilities returned for every token, capped at the vocabulary; used with score centering."""
    max_new_tokens: int = 64
    """Budget of sampled tokens per turn."""
    max_model_len: int = 1024
    """Longest trajectory the engine can hold, prompt included."""
    weight_sync: str = "auto"
    """``merged`` or ``adapter`` (LoRA actor), ``full`` (full weights); auto: merged or full."""
    weight_channel: str = "ray"
    """How they travel: ``ray`` (through Ray's object store) or ``nccl`` (full weights from GPU to GPU, by vLLM's weight
    transfer)."""
    on_update: str = "keep"
    """What happens to requests in flight when new weights arrive: ``keep`` (frozen, then on under the new weights) or
    ``abort`` (ended, and re-issued with what they had sampled)."""
    dtype: str = "float32"
    """``float32``, ``bfloat16`` or ``float16``, of the engine's weights."""
    quantize: Optional[str] = None
    """Round what is served to ``int8``, ``int4``, ``int3`` or ``fp8`` per output channel: a stand-in for a low-precision
    engine. Held-out problems are then answered by one more engine, under the actor's own weights."""
    weight_noise: float = 0.0
    """Noise on what is served, drawn anew at every sync, relative to the root mean square of an output channel."""
    max_concurrency: int = 256
    """Episodes that one worker runs at once."""
    probe_every: int = 10
    """Every so many weight syncs the engine's log-probabilities of a fixed prompt are compared with the actor's; 0: never,
    as with ``quantize`` or ``weight_noise``."""
    probe_tolerance: float = 1e-3
    """Largest difference accepted by that comparison, nats (raise it for bfloat16 engines)."""
    timeout_s: float = 600.0
    """Longest time one episode or one engine call may take; a worker that does not answer for so long is started again."""
    max_restarts: int = 5
    """Times that one rollout worker is started again after its process, its engine or its node was lost; then the run goes on
    with the others, and ends when none is left."""
    cpus: float = 1.0
    """CPUs that Ray reserves for a worker."""
    gpus: float = 0.0
    """GPUs that Ray reserves for a worker."""
    tensor_parallel_size: int = 1
    """GPUs that one engine spans."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """More arguments of the engine."""
    server_urls: list[str] = field(default_factory=list)
    """sglang: addresses of running servers, one for each worker; empty: every worker starts its own."""
    weights_dir: Optional[str] = None
    """sglang: folder that new weights pass through, seen by worker and server alike; null: memory of the worker's machine."""


@dataclass
class OptimConfig:
    """AdamW with a schedule and a gradient clip."""

    lr: float = 1e-6
    """Learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Adam's decay rates."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Optional[float] = 1.0
    """Clip of the global gradient norm; null: none."""
    schedule: str = "constant"
    """``constant``, ``linear`` or ``cosine`` after the warm-up."""
    warmup_steps: int = 0
    """Optimiser steps of linear warm-up."""
    total_steps: Optional[int] = None
    """Optimiser steps after which a decaying schedule ends."""
    min_lr_ratio: float = 0.0
    """Fraction of lr that a decaying schedule ends at."""


@dataclass
class LoraConfig:
    """A low-rank adapter (PEFT)."""

    rank: int = 16
    """Rank of the factors."""
    alpha: float = 32.0
    """Scale: the adapter adds alpha / rank * B A."""
    targets: Any = "all-linear"
    """PEFT target modules: a list of names, a regular expression, or all-linear (every linear layer but the head)."""
    target_parameters: list[str] = field(default_factory=list)
    """PEFT target parameters, for weights that are not linear layers (``mlp.experts.gate_up_proj``); beside ``targets``."""


@dataclass
class ActorConfig:
    """The policy that is trained."""

    mode: str = "lora"
    """``lora`` (an adapter on the frozen base) or ``full`` (all weights)."""
    ranks: int = 1
    """Learner processes; the model is sharded over them by FSDP2."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """The adapter, in mode lora."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser."""
    frozen_patterns: list[str] = field(default_factory=list)
    """Parameters whose name contains one of these do not train; ``all-attention``: those of every layer through which tokens
    see each other, whatever the architecture calls it."""
    micro_batch_tokens: int = 16384
    """Most tokens of one forward and backward pass on one rank."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    cpus: float = 1.0
    """CPUs that Ray reserves for a rank."""
    gpus: float = 0.0
    """GPUs that Ray reserves for a rank."""
    threads: int = 1
    """CPU threads of a rank."""


@dataclass
class CriticConfig:
    """The value model; it exists when ``algorithm.advantage`` is gae."""

    mode: str = "lora"
    """``lora`` (adapter and value head on the frozen base) or ``full`` (all weights)."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """The adapter, in mode lora."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=5e-6, warmup_steps=10))
    """The optimiser."""
    updates_per_step: int = 2
    """K: critic updates per policy step."""
    warmup_steps: int = 0
    """Steps of value pretraining at the start, during which the actor does not move."""
    vf_coef: float = 1.0
    """Factor of the value loss."""
    clip_range: Optional[float] = None
    """Clip of the new value around the old one; null: none."""
    frozen_patterns: list[str] = field(default_factory=list)
    """Parameters whose name contains one of these do not train; ``all-attention``: those of every layer through which tokens
    see each other, whatever the architecture calls it."""
    ensemble: int = 1
    """Critics whose values are averaged; each is one adapter."""
    per_env: bool = False
    """One critic for each environment of the run; a trajectory of any other environment is an error."""


@dataclass
class ClusterConfig:
    """Ray."""

    address: Optional[str] = None
    """null: the cluster of RAY_ADDRESS (Ray sets it inside a job), else a Ray head started on this machine; ``local``: the
    latter in any case; ``auto`` or host:port: join a running cluster."""
    device: str = "auto"
    """``cpu``, ``cuda`` or auto: cuda where ``actor.gpus`` is above 0."""
    startup_timeout_s: float = 600.0
    """Longest time the engines and ranks may take to start."""
    watchdog_s: float = 900.0
    """Longest time without progress: no rollout ends and no part of a step does. At half of it a sentence says what waits for
    what, at all of it the run ends with a dump."""


PROMPT_FILES = ("jsonl", "parquet")
"""Tasks that read ``task.train`` and ``task.eval``."""
HELD_OUT = 256
"""Held-out problems where nothing says how many."""


@dataclass
class EvalConfig:
    """Held-out evaluation."""

    every: int = 20
    """Steps between evaluations; 0: only before the first step and after the last."""
    size: Optional[int] = None
    """Held-out problems; null: all of ``task.eval``, or 256 without one."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    max_failed: float = 0.1
    """Largest share of the held-out episodes that may fail; they are left out of the mean. More of them end the run."""


@dataclass
class CheckpointConfig:
    """Recovery."""

    every: int = 100
    """Steps between checkpoints; 0: only after the last step."""
    keep_last: int = 3
    """Newest checkpoints that are kept."""
    keep_every: int = 0
    """Checkpoints of steps that this divides are kept for good; 0: none."""
    keep_best: int = 1
    """Checkpoints with the highest held-out reward that are kept; only those of steps with an evaluation have one."""
    max_failures: int = 3
    """Times that a run starts again by itself from its last checkpoint after a process that it needs has died, counted anew
    from each new checkpoint; one that cannot even start ends the run."""


@dataclass
class LogConfig:
    """What a user watches."""

    wandb: str = "auto"
    """``auto`` (online with a key, else offline), ``online``, ``offline`` or ``disabled``."""
    project: str = "rlframe"
    """wandb project."""
    entity: Optional[str] = None
    """wandb entity."""
    rollouts_every: int = 10
    """Steps between samples of rollouts written to ``rollouts/``; 0: none."""
    rollouts_count: int = 8
    """Trajectories in such a sample, from the worst to the best reward of the batch."""
    rollouts_tokens: int = 2048
    """Tokens of such a trajectory that are written with all their numbers; of a longer one, its beginning and its end."""
    rollouts_mb: float = 256.0
    """Most MiB of all samples together; when they take more, some in the middle of the run are removed."""
    console: bool = True
    """One line a step and a progress bar."""


@dataclass
class ServerConfig:
    """``rlframe serve``: the HTTP API in front of sessions and samplers."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0: any free one."""
    keys_file: Optional[str] = None
    """File of API keys, a line each: a key that begins with ``tml-``, or a user's name and a key; null: one key is made up and
    kept in the run directory."""
    lora_alpha: float = 32.0
    """Scale of the adapters: alpha / rank * B A."""
    max_rank: int = 64
    """Largest rank that a client may ask for."""
    max_models: int = 64
    """Most models in memory; more are put to sleep on disk, longest unused first."""
    max_loras: int = 8
    """Most adapters that a sampler holds ready at once."""
    max_request_mb: int = 64
    """Largest body of a request."""
    idle_timeout_s: float = 1800.0
    """After this long without a sign of its client a model is saved and leaves memory, until it is asked for again."""
    result_ttl_s: float = 900.0
    """How long the result of a request is kept for its client."""


@dataclass
class Config:
    """A whole job."""

    name: str = "run"
    """Name of the run."""
    run_dir: str = "runs/${name}"
    """Run directory; ``${name}`` stands for the name."""
    seed: int = 0
    """Seed of data order, adapters and, where the engine allows it, sampling."""
    steps: int = 100
    """Policy steps."""
    batch_size: int = 128
    """Trajectories per step."""
    max_staleness: int = 2
    """Policy versions that a trajectory may lag when it is trained on; 0: synchronous."""
    reorder_window: int = 0
    """Prompts by which training may run ahead of the oldest unfinished rollout, so that a slow one does not hold up the batch;
    they are taken from the prompts in flight, so that ``max_staleness`` holds. Short answers then train first, and fresher than
    long ones. 0: strict order of admission."""
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        """``runs/${name}`` follows the name without Hydra, too; ``~`` is the user's folder, as in all other paths."""
        self.run_dir = os.path.expanduser(self.run_dir.replace("${name}", self.name))


def critic_names(config: Config, environments: int = 1) -> tuple[str, ...]:
    """Names of the critic sessions; none where the advantage needs no critic, one per environment with ``critic.per_env``."""
    if config.algorithm.advantage != "gae":
        return ()
    count = environments if config.critic.per_env else config.critic.ensemble
    return tuple(f"critic_{i}" for i in range(count))


def eval_size(config: Config) -> int | None:
    """Number of held-out problems; None: all rows of ``task.eval``."""
    if config.eval.size is None and config.task.eval is not None and config.task.name in PROMPT_FILES:
        return None
    return HELD_OUT if config.eval.size is None else config.eval.size


def serves_other_weights(rollout: RolloutConfig) -> bool:
    """Whether the engines are given weights that are not the actor's, on purpose."""
    return rollout.quantize is not None or rollout.weight_noise > 0
