"""LoRA adapters inside one backbone: injected by PEFT, activated here, one per session.

PEFT finds the targets and owns the layers; which adapter is active, and what is trainable, is decided only here. Switching
adapters touches no ``requires_grad``. Optimisers and the value head live elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

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
        self._linears = [n for n, module in model.named_modules() if isinstance(module, nn.Linear) and n not in self._heads]

    def create(self, config: LoraConfig, *, seed: int, value_head: bool) -> Adapter:
        """Inject a new adapter with fresh factors (the adapter changes nothing until it is trained).

        Raises:
            ConfigError: the rank is not positive, a target matches nothing, or the head is targeted where it must not be.
        """
        peft_config = self._peft_config(config, value_head)
        key = f"session_{self._created}"
        before = {name: p.requires_grad for name, p in self._model.named_parameters()}
        try:
            with torch.random.fork_rng(devices=[]), _whole_shapes(self._model):
                if self._tuner is None:
                    self._tuner = LoraModel(self._model, peft_config, key)
                else:
                    self._tuner.peft_config[key] = peft_config
                    self._tuner.inject_adapter(self._model, key)
        except ValueError as error:
            self._drop(key)
            raise ConfigError(
                f"PEFT refuses lora.targets={config.targets!r} for this model: {_first_sentence(error)}"
            ) from error
        self._created += 1
        adapter = Adapter(self._model, key, peft_config)
        for layer in adapter.layers.values():
            layer._active_adapter = []
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(before.get(name.replace(".base_layer", ""), before.get(name, False)))
        adapter.reset(seed)
        return adapter

    def delete(self, adapter: Adapter) -> None:
        """Remove an adapter's factors from the model."""
        self._drop(adapter.key)

    def _drop(self, key: str) -> None:
        if self._tuner is not None and key in self._tuner.peft_config:
            self._tuner.delete_adapter(key)

    def _peft_config(self, config: LoraConfig, value_head: bool) -> PeftConfig:
        if config.rank <= 0:
            raise ConfigError(f"lora.rank is {config.rank}; it must be at least 1.")
        targets, parameters = config.targets, list(config.target_parameters)
        if targets == "all-linear":
            targets = sorted({name.rpartition(".")[2] for name in self._linears})
        elif not isinstance(targets, str):
            targets = list(targets)
        self._check_targets(targets, parameters, value_head)
        return PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT only divides it by the rank
            target_modules=targets,
            target_parameters=parameters or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=self._model.name_or_path,
        )

    def _check_targets(self, targets: str | list[str], parameters: list[str], value_head: bool) -> None:
        chosen: set[str] = set()
        for target in [targets] if isinstance(targets, str) else targets:
            found = {
                n for n in self._modules if (re.fullmatch(target, n) if isinstance(targets, str) else _is_called(n, target))
            }
            if not found:
                raise ConfigError(
                    f"lora.targets has {target!r}, which no module of this model matches; weights that are not modules, like "
                    "stacked experts, go into lora.target_parameters."
                )
            chosen |= found
        for target in parameters:
            if not any(_is_called(name, target) for name in self._parameters):
                raise ConfigError(f"lora.target_parameters has {target!r}, but no parameter of this model is called that.")
        if not chosen and not parameters:
            raise ConfigError("lora.targets and lora.target_parameters are empty, so the adapter would change nothing.")
        if chosen & self._heads and value_head:
            raise ConfigError(
                "lora.targets includes the LM head, which a session with a value head does not use; leave it out."
            )
        if chosen & (self._heads | self._embeddings) and self._model.config.get_text_config().tie_word_embeddings:
            raise ConfigError("lora.targets includes the LM head or the embedding, but this model ties the two; leave it out.")


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

    def delta(self, layer: LoraLayer) -> Tensor:
        """What the adapter adds to a layer's base weight, in the base weight's shape."""
        return layer.get_delta_weight(self.key)  # type: ignore[attr-defined]

    def export_config(self) -> dict[str, Any]:
        """PEFT's ``adapter_config.json`` as a dictionary."""
        config = {**self.peft_config.to_dict(), "inference_mode": True}
        return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


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


def _first_sentence(error: Exception) -> str:
    return str(error).split("\n")[0].split(". ")[0].rstrip(".") + "."
