"""LoRA adapters inside one backbone: injected by PEFT, activated here, one per session.

PEFT finds the targets and owns the layers; which adapter is active, and what is trainable, is decided only here. Switching
adapters touches no ``requires_grad``. Optimisers and the value head live elsewhere.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlframe.adapter_targets import unsupported_layers
from rlframe.config import ConfigError, LoraConfig
from rlframe.seeding import normal_, uniform_

_FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


class Adapters:
    """All adapters of one model. They are replicated on every rank and unknown to FSDP."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._tuner: LoraModel | None = None
        self._created = 0
        self._modules = [name for name, _ in model.named_modules()]
        self._parameters = [name for name, _ in model.named_parameters()]
        self._heads = {name for name, module in model.named_modules() if module is model.get_output_embeddings()}
        self._embeddings = {name for name, module in model.named_modules() if module is model.get_input_embeddings()}
        layers = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and n not in self._heads}
        self._unsupported = unsupported_layers(model, layers)
        self._linears = [name for name in layers if name not in self._unsupported]

    def linear_modules(self) -> dict[str, list[str]]:
        """Paths of the linear layers by what they are part of: ``attn``, ``mlp``, and ``unembed`` where the head is its own."""
        attention = [name for name in self._linears if "attn" in name or "attention" in name]
        tied = self._model.config.get_text_config().tie_word_embeddings
        return {
            "attn": attention,
            "mlp": [name for name in self._linears if name not in set(attention)],
            "unembed": [] if tied else sorted(self._heads),
        }

    def create(self, config: LoraConfig, *, seed: int, value_head: bool) -> Adapter:
        """Inject a new adapter with fresh factors (the adapter changes nothing until it is trained).

        Raises:
            ConfigError: the rank is not positive, a target matches nothing, or the head is targeted where it must not be.
        """
        peft_config, unmatched = self._peft_config(config, value_head)
        key = f"session_{self._created}"
        trainable = {id(p) for p in self._model.parameters() if p.requires_grad}
        try:
            self._inject(key, peft_config)
        except ValueError as error:
            self._drop(key)
            reason = str(error).split("\n")[0].split(". ")[0].rstrip(".")
            raise ConfigError(f"PEFT refuses lora.targets={config.targets!r} for this model: {reason}.") from error
        # Names that PEFT understands as stacked experts are gone from its config by now.
        unmatched &= set(peft_config.target_modules or ())
        if unmatched:
            self._drop(key)
            raise ConfigError(f"lora.targets has {min(unmatched)!r}, which no module of this model is called.")
        self._created += 1
        adapter = Adapter(self._model, key, peft_config)
        for layer in adapter.layers.values():
            layer._active_adapter = []
        for parameter in self._model.parameters():
            parameter.requires_grad_(id(parameter) in trainable)
        adapter.reset(seed)
        return adapter

    def _inject(self, key: str, peft_config: PeftConfig) -> None:
        with torch.random.fork_rng(devices=[]), _whole_shapes(self._model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what PEFT warns about is checked, or refused, here
            if self._tuner is None:
                self._tuner = LoraModel(self._model, peft_config, key)
            else:
                self._tuner.peft_config[key] = peft_config
                self._tuner.inject_adapter(self._model, key)

    def delete(self, adapter: Adapter) -> None:
        """Remove an adapter's factors from the model."""
        self._drop(adapter.key)

    def _drop(self, key: str) -> None:
        if self._tuner is not None and key in self._tuner.peft_config:
            self._tuner.delete_adapter(key)

    def _peft_config(self, config: LoraConfig, value_head: bool) -> tuple[PeftConfig, set[str]]:
        """PEFT's config, and the listed targets that no module is called by."""
        if config.rank <= 0:
            raise ConfigError(f"lora.rank is {config.rank}; it must be at least 1.")
        targets, parameters = config.targets, list(config.target_parameters)
        if targets == "all-linear":
            targets = self._all_linear()
        elif not isinstance(targets, str):
            targets = list(targets)
        if not targets and not parameters:
            raise ConfigError("lora.targets and lora.target_parameters are empty, so the adapter would change nothing.")
        for target in parameters:
            if not any(_is_called(name, target) for name in self._parameters):
                raise ConfigError(f"lora.target_parameters has {target!r}, but no parameter of this model is called that.")
        unmatched = self._check_modules(targets, value_head)
        peft_config = PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT only divides it by the rank
            target_modules=targets,
            target_parameters=parameters or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=self._model.name_or_path,
        )
        return peft_config, unmatched

    def _all_linear(self) -> list[str]:
        """The names that linear layers are called by; whole paths where another module has the same name."""
        linears, names = set(self._linears), set()
        for called in {name.rpartition(".")[2] for name in linears}:
            alike = {name for name in self._modules if _is_called(name, called)}
            names |= {called} if alike <= linears else alike & linears
        return sorted(names)

    def _check_modules(self, targets: str | list[str], value_head: bool) -> set[str]:
        if isinstance(targets, str):
            chosen, unmatched = {name for name in self._modules if re.fullmatch(targets, name)}, set()
            if not chosen:
                raise ConfigError(f"lora.targets is {targets!r}, which no module of this model matches.")
        else:
            chosen = {name for name in self._modules if any(_is_called(name, target) for target in targets)}
            unmatched = {target for target in targets if not any(_is_called(name, target) for name in chosen)}
        if found := sorted(chosen & self._unsupported.keys()):
            raise ConfigError(f"lora.targets includes {found[0]}, but {self._unsupported[found[0]]}; leave it out.")
        if chosen & self._heads and value_head:
            raise ConfigError(
                "lora.targets includes the LM head, which a session with a value head does not use; leave it out."
            )
        if chosen & (self._heads | self._embeddings) and self._model.config.get_text_config().tie_word_embeddings:
            raise ConfigError("lora.targets includes the LM head or the embedding, but this model ties the two; leave it out.")
        return unmatched


@dataclass(frozen=True)
class Coverage:
    """How much of a model an adapter changes."""

    share: float
    """Of all base weights, those that the adapter adds something to."""
    stacked: list[str]
    """What stacked weights (experts of a mixture) without adapter are called inside a block."""
    stacked_share: float
    """Of all base weights, those."""

    def describe(self, role: str) -> str:
        """One sentence for a person; ``role`` is the section of the configuration."""
        said = f"{role}: adapters on {self.share:.1%} of the model's weights"
        if not self.stacked:
            return f"{said}."
        return (
            f"{said}; {self.stacked_share:.1%} are experts stacked in one parameter and have none, since {role}.lora.targets "
            f"names layers. {role}.lora.target_parameters=[{','.join(self.stacked)}] adapts them."
        )


class Adapter:
    """One adapter: its layers, its factors, and what it adds to the base weights."""

    def __init__(self, model: PreTrainedModel, key: str, peft_config: PeftConfig) -> None:
        self.key = key
        self.peft_config = peft_config
        self.layers: dict[str, LoraLayer] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, LoraLayer) and key in module._all_available_adapter_names()
        }
        """Module path (as PEFT sees it) to the layer that carries the factors."""

    def factors(self) -> dict[str, nn.Parameter]:
        """Factor names (``<module>.lora_A.weight``, ...) to the parameters in the model."""
        found: dict[str, nn.Parameter] = {}
        for name, layer in self.layers.items():
            for kind in _FACTORS:
                holder = getattr(layer, kind, None)
                if holder is None or self.key not in holder:
                    continue
                part = holder[self.key]
                found[f"{name}.{kind}" if isinstance(part, nn.Parameter) else f"{name}.{kind}.weight"] = (
                    part if isinstance(part, nn.Parameter) else part.weight
                )
        return found

    def reset(self, seed: int) -> None:
        """Fresh factors that depend on ``seed`` and their names alone; their product is zero.

        A is uniform within 1 / sqrt(fan in) (PEFT's Kaiming rule), B zero; for embeddings A is zero and B normal.
        """
        for name, parameter in self.factors().items():
            if ".lora_A" in name:
                uniform_(parameter, 1 / math.sqrt(parameter.shape[1]), seed, name)
            elif ".lora_embedding_B" in name:
                normal_(parameter, 1.0, seed, name)
            else:
                nn.init.zeros_(parameter)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model computes with this adapter (and no other) inside."""
        for layer in self.layers.values():
            layer._active_adapter = [self.key]
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer._active_adapter = []

    def deltas(self) -> dict[str, LoraLayer]:
        """Base parameter names (as the bare model has them) that this adapter changes, and the layer that knows how."""
        changed = {}
        for name, layer in self.layers.items():
            attribute = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
            changed[f"{bare(name)}.{attribute}"] = layer
        return changed

    def coverage(self, model: PreTrainedModel) -> Coverage:
        """What share of the base weights this adapter changes, and which stacked weights have none; tied ones count once."""
        changed = self.deltas().keys()
        sizes = {bare(name): p.numel() for name, p in model.named_parameters() if ".lora_" not in name}
        stacked = _stacked(model)
        missing = stacked - changed
        return Coverage(
            share=sum(size for name, size in sizes.items() if name in changed) / sum(sizes.values()),
            stacked=sorted({re.sub(r"^.*\.\d+\.", "", name) for name in missing}),
            stacked_share=sum(sizes[name] for name in missing) / sum(sizes.values()),
        )

    def delta(self, layer: LoraLayer) -> Tensor:
        """What the adapter adds to a layer's base weight, in the base weight's shape."""
        return layer.get_delta_weight(self.key)  # type: ignore[attr-defined]

    def export_config(self) -> dict[str, Any]:
        """PEFT's ``adapter_config.json`` as a dictionary."""
        config = {**self.peft_config.to_dict(), "inference_mode": True}
        return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


def _stacked(model: nn.Module) -> set[str]:
    """Bare names of parameters that hold the matrices of several experts: [experts, rows, columns], in no layer of torch."""
    return {
        bare(f"{path}.{name}" if path else name)
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.")
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and ".lora_" not in f"{path}.{name}" and min(parameter.shape) > 1
    }


@contextmanager
def _whole_shapes(model: nn.Module) -> Iterator[None]:
    """Let PEFT see plain parameters of whole shape (without memory): it would size adapters by this rank's shard."""
    held = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    for module, name, parameter in held:
        stand_in = torch.empty(1, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        module.register_parameter(name, nn.Parameter(stand_in, requires_grad=False))
    try:
        yield
    finally:
        for module, name, parameter in held:
            module.register_parameter(name, parameter)


def _is_called(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def bare(name: str) -> str:
    """A name without the levels that PEFT inserts around adapted modules."""
    return name.replace(".base_layer", "")
