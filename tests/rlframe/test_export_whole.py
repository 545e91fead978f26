"""An exported folder holds all that the model's own folder holds; and what cannot be sampled from is refused."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlframe.config import ConfigError
from rlframe.session_export import export
from tests.support.session_cases import SHAPE, load, randomise, spec
from tests.support.tiny_models import DEEPSEEK_V3

STORED = {"deepseek_v3": "e_score_correction_bias", "apertus": "act_fn.beta", "biogpt": "embed"}
"""A tensor that each folder holds; the last model does not name its blocks."""


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("name", STORED)
def test_a_merged_folder_has_every_tensor_of_the_original(name, kind, tmp_path):
    torch.manual_seed(0)
    shape = {**SHAPE, **({**DEEPSEEK_V3, "head_dim": 4} if name == "deepseek_v3" else {})}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **shape, pad_token_id=0))
    with torch.no_grad():
        for buffer_name, buffer in model.named_buffers():
            if "e_score" in buffer_name:
                buffer.copy_(torch.randn(buffer.shape))
    model.save_pretrained(tmp_path / "model")
    session = load(str(tmp_path / "model"), None, trainable=kind == "full").create_session("a", spec(kind=kind))
    if kind == "lora":
        randomise(session)
    export(session, tmp_path / "merged", merged=True)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "merged"))
    assert before.keys() == after.keys() and any(STORED[name] in key for key in before)
    parameters = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    kept = [key for key in before if (key not in parameters and "experts." not in key) or kind == "full"]
    assert all(torch.equal(before[key], after[key]) for key in kept)


def test_attention_to_later_tokens_is_refused(tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("bert-generation", **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="see those that come after them"):
        load(str(tmp_path), None)
