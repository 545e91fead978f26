"""The actor: the policy as a role over one session. Optimiser and weights are the session's, the loss is the library's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlframe.checksum import weights_checksum
from rlframe.losses.logprobs import LogProbs
from rlframe.losses.policy import PolicyLoss
from rlframe.metrics import Metrics
from rlframe.quantize import degrade
from rlframe.sessions import Session
from rlframe.types import Batch
from workers.engines.protocol import WeightUpdate
from workers.rollout.settings import serves_other_weights
from workers.settings import Config


class Actor:
    """One policy on one rank; every method is called on all ranks together."""

    def __init__(self, session: Session, config: Config) -> None:
        self.session = session
        self.config, self.rollout, self.seed = config.actor, config.rollout, config.seed
        self.loss = PolicyLoss(config.algorithm, config.rollout.temperature)

    def update(self, shard: Batch, num_actions: int) -> Metrics:
        """One policy step on this rank's ``shard``; the gradient is divided by ``num_actions``, the whole batch's count."""
        outputs = self.session.forward_backward(shard, self.loss, self.config.micro_batch_tokens)
        stats = self.session.optim_step(1.0 / num_actions)
        for name, value in stats.items():
            outputs.metrics.max(f"actor/{name}", value)
        return outputs.metrics

    def logprobs(self, shard: Batch, temperature: float) -> dict[str, Tensor]:
        """Log-probabilities and entropy of the shard's action tokens under the current policy."""
        return self.session.forward(shard, LogProbs(temperature), self.config.micro_batch_tokens).per_token

    def weight_update(self, version: int, mode: str, dtype: str, exact: bool = False) -> tuple[WeightUpdate | None, str]:
        """What engines need to serve this policy as ``version`` (None except on rank 0), and the checksum they must reach.

        ``exact``: the policy itself, whatever ``rollout.quantize`` and ``rollout.weight_noise`` say.
        """
        if serves_other_weights(self.rollout) and not exact:
            tensors = self._degraded(version, dtype)
            checksum = weights_checksum(tensors.values())
        else:
            tensors = self.session.sampler_tensors(mode, dtype)
            checksum = self.session.sampler_checksum(mode, dtype)
        if not tensors:
            return None, checksum
        adapter = self.session.adapter_config() if mode == "adapter" else None
        arrays = {name: _as_array(tensor) for name, tensor in tensors.items()}
        return WeightUpdate(version=version, mode=mode, tensors=arrays, dtype=dtype, adapter=adapter), checksum

    def _degraded(self, version: int, dtype: str) -> dict[str, Tensor]:
        rollout = self.rollout
        return degrade(
            self.session.sampler_tensors("full", "float32"),
            form=rollout.quantize,
            noise=rollout.weight_noise,
            seed=self.seed,
            version=version,
            dtype=getattr(torch, dtype),
        )


def _as_array(tensor: Tensor) -> np.ndarray:
    """numpy has no bfloat16: two-byte floats travel as their bit patterns."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.uint16) if tensor.element_size() == 2 else tensor).numpy()
