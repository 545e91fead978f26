"""What the rest of rlframe knows about an engine before importing it: requirements, capabilities, refusals.

Every engine has one `EngineSpec` in its folder (``workers/engines/NAME/spec.py``, the object ``ENGINE``), which
`workers.engines.registry` names. Checks, memory estimate, doctor, dry-run, server and rollout workers ask it; none of them
knows an engine by name. Importing a spec imports no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlframe.config import ConfigError
from rlframe.seeding import derive_seed
from workers.rollout.settings import ENGINE_DTYPES, RolloutConfig
from workers.settings import Config

if TYPE_CHECKING:
    from torch import Tensor

    from workers.engines.adapters import AdapterEngine
    from workers.engines.protocol import Engine, Stream


class EngineSpec:
    """A minimal engine: only how to build it. Engines with more capabilities, requirements or refusals override members."""

    title: str = "the engine"
    """Its name in messages."""
    package: str | None = None
    """Module that it needs; None: nothing beyond rlframe's own requirements."""
    distributions: tuple[str, ...] = ()
    """Packages of which one brings that module; ``rlframe doctor`` looks for them."""
    install: str = ""
    """How to get it, as the end of a sentence."""
    dtypes: tuple[str, ...] = ENGINE_DTYPES
    """Values of ``rollout.dtype`` that it serves."""
    weight_syncs: tuple[str, ...] = ("full", "merged", "adapter")
    """Modes of `WeightUpdate` that it loads."""
    weight_channels: tuple[str, ...] = ("ray",)
    """Values of ``rollout.weight_channel`` that it takes; one other than ``ray`` needs `send`."""
    tensor_parallel: bool = False
    """Whether it spans several GPUs (``rollout.tensor_parallel_size``)."""
    serves_adapters: bool = False
    """Whether it serves many adapters at once, as ``rlframe serve`` asks for; it then needs `make_adapter_engine`."""
    settings: tuple[str, ...] = ()
    """Settings that this engine alone reads, such as ``rollout.server_urls``; with any other they are refused."""
    takes_arguments: bool = True
    """Whether it reads ``rollout.engine_args``."""
    owned: Mapping[str, str] = {}
    """Names in ``rollout.engine_args`` that are not the user's -> the end of "would overrule what ..."."""

    def make(self, config: Config, model_path: str, index: int) -> Engine:
        """The engine of rollout worker ``index``, not started.

        Args:
            config: the whole, checked job.
            model_path: local Hugging Face folder of the base model.
            index: number of the worker, from 0; engines of one run sample from different seeds.
        """
        raise NotImplementedError(f"{type(self).__name__} has no make().")

    def make_adapter_engine(self, config: Config, model_path: str, index: int) -> AdapterEngine:
        """The engine of sampler ``index`` of the server, not started; arguments as in `make`."""
        raise NotImplementedError(f"{type(self).__name__} has no make_adapter_engine().")

    def check(self, config: Config) -> None:
        """Refuse whatever else this engine does not support; the members above are checked already.

        Raises:
            ConfigError: one sentence that names the settings and says what to change.
        """

    def needed(self, rollout: RolloutConfig) -> str | None:
        """`package`, where the engine runs on this machine; None where it needs none here."""
        del rollout
        return self.package

    def arguments(self) -> dict[str, str] | None:
        """Name -> annotation of every argument that ``rollout.engine_args`` may hold; None: not known here, none is checked."""
        return None

    def reserved_cache(self, rollout: RolloutConfig) -> float | None:
        """Bytes of key-value cache that it takes at the start; None: as its requests need, or what a GPU has left."""
        del rollout
        return None

    def send(self, tensors: Mapping[str, Tensor], stream: Stream, ranks: int) -> None:
        """Send full weights from the learner's first rank to all engines, where the channel is another than ``ray``.

        Args:
            tensors: of the update, in the order of ``stream.names``, in host or device memory.
            stream: as announced to the engines (`WeightUpdate.stream`).
            ranks: the learner and all GPUs of all engines that take part.
        """
        raise NotImplementedError(f"{type(self).__name__} has no send().")


def common_options(config: Config, index: int) -> dict[str, Any]:
    """Arguments that engines with a process of their own share: lengths, dtype, seed, threads, limits, further arguments."""
    rollout = config.rollout
    return {
        "max_model_len": rollout.max_model_len,
        "dtype": rollout.dtype,
        "seed": derive_seed(config.seed, index) % 2**31,
        "threads": threads(rollout),
        "max_num_seqs": rollout.max_concurrency,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "trust_remote_code": config.model.trust_remote_code,
        "timeout_s": rollout.timeout_s,
        "engine_args": rollout.engine_args,
    }


def adapter_rank(config: Config) -> int:
    """Rank of the one adapter that rollout workers serve; 0: none, weights come as ``full`` or ``merged``."""
    return config.actor.lora.rank if config.rollout.weight_sync == "adapter" else 0


def threads(rollout: RolloutConfig) -> int:
    """CPU threads of an engine."""
    return max(1, int(rollout.cpus))


def refuse(condition: bool, sentence: str) -> None:
    """Raise ConfigError with ``sentence`` if the condition holds."""
    if condition:
        raise ConfigError(sentence)


def refuse_random_weights(rollout: RolloutConfig) -> None:
    """Every way of reading the weights of the model's folder is the user's choice, but one that reads none is refused."""
    refuse(
        rollout.engine_args.get("load_format") == "dummy",
        "rollout.engine_args.load_format=dummy would serve random weights instead of the model's; leave it out, or choose a "
        "format that reads the folder, such as safetensors.",
    )


MODEL = "model.path decides"
OWNED = {
    "dtype": "rollout.dtype decides",
    "trust_remote_code": "model.trust_remote_code decides",
    "tokenizer": f"{MODEL} (weights and tokenizer of one folder)",
    **dict.fromkeys(("enable_lora", "max_lora_rank"), "rollout.weight_sync and actor.lora.rank decide"),
    "lora_target_modules": "actor.lora.targets decides",
    "tensor_parallel_size": "rollout.tensor_parallel_size decides",
    **dict.fromkeys(
        ("pipeline_parallel_size", "data_parallel_size", "nnodes"), "rollout.workers and rollout.tensor_parallel_size decide"
    ),
    **dict.fromkeys(("logits_processors", "watermark_config"), "the losses need (the sampled distribution is the model's own)"),
    "skip_tokenizer_init": "the worker decides (token ids in and out)",
}
"""Arguments of more than one engine that are not the user's, as `EngineSpec.owned`."""
NO_DEFAULTS = "the losses need (no sampling defaults of the model's own)"
AS_DESCRIBED = f"{MODEL} (the trainer computes with the model as its folder describes it)"
