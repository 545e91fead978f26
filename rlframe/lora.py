"""LoRA adapters inside one backbone: injected by PEFT, activated here, one per session.

PEFT finds the targets and owns the layers; which adapter is active, and what is trainable, is decided only here. Switching
adapters touches no ``requires_grad``. Optimisers and the value head live elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
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
        head = model.get_output_embeddings()
        self._head_names = {name for name, module in model.named_modules() if module is head}
        self._linears = sorted(
            name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in self._head_names
        )

    def create(self, config: LoraConfig, *, seed: int, value_head: bool) -> Adapter:
        """Inject a new adapter with fresh factors (the adapter changes nothing until it is trained).

        Raises:
            ConfigError: the rank is not positive, nothing matches the targets, or the head is targeted where it must not be.
        """
        peft_config = self._peft_config(config)
        key = f"session_{self._created}"
        before = {name: p.requires_grad for name, p in self._model.named_parameters()}
        try:
            with torch.random.fork_rng(devices=[]):
                if self._tuner is None:
                    self._tuner = LoraModel(self._model, peft_config, key)
                else:
                    self._tuner.peft_config[key] = peft_config
                    self._tuner.inject_adapter(self._model, key)
        except ValueError as error:
            self._drop(key)
            raise ConfigError(f"lora.targets={config.targets!r} does not fit this model: {_first_sentence(error)}") from error
        self._created += 1
        adapter = Adapter(self._model, key, peft_config)
        for layer in adapter.layers.values():
            layer._active_adapter = []
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(before.get(name.replace(".base_layer", ""), before.get(name, False)))
        try:
            self._check_head(adapter, value_head)
        except ConfigError:
            self._drop(key)
            raise
        adapter.reset(seed)
        return adapter

    def delete(self, adapter: Adapter) -> None:
        """Remove an adapter's factors from the model."""
        self._drop(adapter.key)

    def _drop(self, key: str) -> None:
        if self._tuner is not None and key in self._tuner.peft_config:
            self._tuner.delete_adapter(key)

    def _peft_config(self, config: LoraConfig) -> PeftConfig:
        if config.rank <= 0:
            raise ConfigError(f"lora.rank is {config.rank}; it must be at least 1.")
        targets = config.targets
        if targets == "all-linear":
            targets = sorted({name.rpartition(".")[2] for name in self._linears})
        elif not isinstance(targets, str):
            targets = list(targets)
            names = [name for name, _ in self._model.named_modules()]
            for target in targets:
                if not any(name == target or name.endswith(f".{target}") for name in names):
                    raise ConfigError(f"lora.targets names {target!r}, but no module of the model is called that.")
        parameters = list(config.target_parameters)
        return PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT only divides it by the rank
            target_modules=targets if targets or not parameters else [],
            target_parameters=parameters or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=self._model.name_or_path,
        )

    def _check_head(self, adapter: Adapter, value_head: bool) -> None:
        targeted = self._head_names & set(adapter.layers)
        if targeted and value_head:
            raise ConfigError(
                "lora.targets includes the LM head, which a session with a value head does not use; leave it out."
            )
        embedding = self._model.get_input_embeddings()
        embeds = {name for name, layer in adapter.layers.items() if layer is embedding or layer.get_base_layer() is embedding}
        if (targeted or embeds) and self._model.config.get_text_config().tie_word_embeddings:
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


def bare(name: str) -> str:
    """A name without the levels that PEFT inserts around adapted modules."""
    return name.replace(".base_layer", "")


def _first_sentence(error: Exception) -> str:
    return str(error).split("\n")[0].split(". ")[0].rstrip(".") + "."
