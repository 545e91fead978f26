"""A transformers model for the torch engine, run so that every token gets the numbers of one eager pass over what precedes it.

Whether keys and states of earlier tokens may be kept between passes is determined here, per model; sampling is
`workers.engines.torch.engine`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from rlframe.context_length import check_rotary_length
from workers.engines.weights import DTYPES

_PROMPT, _TOTAL = 9, 24
"""Tokens of a request that `keeps_states` tries: all at once, then one by one."""
_CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Rounding: differences of logits over their largest, where only the order of additions differs."""


class TorchModel:
    """The model of a folder, on one device, frozen.

    Args:
        path: local Hugging Face folder.
        max_model_len: most tokens of a request.
        dtype: name of the weights' dtype.
        device: where it lives.
        trust_remote_code: run code that the folder ships.

    Raises:
        ConfigError: requests may become longer than the model's rotary positions stay the same.
    """

    def __init__(
        self, path: str, *, max_model_len: int, dtype: str, device: torch.device, trust_remote_code: bool = False
    ) -> None:
        # Other kernels leave out what they lack (soft-capped products, sinks) without a word.
        model: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=DTYPES[dtype],
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
        self.module: Any = model.to(device).eval().requires_grad_(False)
        """The module; adapters may be put into it or around it."""
        check_rotary_length(max_model_len, model.config.get_text_config())
        self._device = device
        self._config = model.config
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        self.keeps_states = self._keeps_states()
        """Whether `next_logits` with a cache gives what it gives without one."""

    @property
    def vocabulary(self) -> int:
        """V."""
        return int(self._config.get_text_config().vocab_size)

    def cache(self) -> DynamicCache | None:
        """An empty cache for one sequence; None where the model cannot be trusted with one."""
        return DynamicCache(config=self._config) if self.keeps_states else None

    @torch.inference_mode()
    def next_logits(self, tokens: list[int], cache: DynamicCache | None) -> Tensor:
        """[V], of the token after ``tokens``: the whole sequence without a cache, else those that the cache does not hold."""
        kept = {"use_cache": False} if cache is None else {"use_cache": True, "past_key_values": cache}
        ids = torch.tensor([tokens], device=self._device)
        return self.module(input_ids=ids, **kept, **self._options).logits[0, -1]

    @torch.inference_mode()
    def _keeps_states(self) -> bool:
        """Try two sequences in turns: some architectures ignore a cache, or keep states in the module itself."""
        generator = torch.Generator().manual_seed(0)
        total = min(_TOTAL, getattr(self._config.get_text_config(), "max_position_embeddings", None) or _TOTAL)
        prompt = min(_PROMPT, total // 2)
        sequences = torch.randint(self.vocabulary, (2, total), generator=generator).tolist()
        try:
            caches = [DynamicCache(config=self._config) for _ in sequences]
            fed = [0, 0]
            for end in range(prompt, total + 1):
                for i, sequence in enumerate(sequences):
                    mine = self.next_logits(sequence[fed[i] : end], caches[i])
                    fed[i] = end
                    exact = self.next_logits(sequence[:end], None)
                    if not (mine - exact).abs().max() <= _CLOSE[mine.dtype] * exact.abs().max():
                        return False
        except Exception:  # whatever an architecture does with a cache that it was not written for
            return False
        return True
