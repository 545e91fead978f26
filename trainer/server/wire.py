"""Bodies of requests. Unknown fields are ignored, so that newer clients can send them."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field


class Body(BaseModel):
    """A JSON body."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CreateSession(Body):
    """``create_session``"""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class SessionId(Body):
    """``session_heartbeat``"""

    session_id: str


class LoraBody(Body):
    """The adapter of a model."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    frozen_module_patterns: list[str] | None = None


class OptimizerBody(Body):
    """Which optimiser a model has."""

    type: str = "adamw"


class CreateModel(Body):
    """``create_model``"""

    session_id: str
    model_seq_id: int = Field(ge=0, lt=10**9)
    base_model: str
    lora_config: LoraBody | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerBody = OptimizerBody()
    frozen_module_patterns: list[str] | None = None


class ModelId(Body):
    """``get_info``, ``unload_model``"""

    model_id: str


class AdamBody(Body):
    """Adam's settings of one step, the SDK's defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    """``optim_step``"""

    model_id: str
    seq_id: int | None = None
    adam_params: AdamBody | None = Field(None, validation_alias=AliasChoices("adam_params", "optim_params"))
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Body):
    """``save_weights``, ``save_weights_for_sampler``"""

    model_id: str
    path: str | None = None
    seq_id: int | None = None
    sampling_session_seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    """``load_weights``: into a model (``model_id``), or as a new one (``session_id``)."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0, lt=10**9)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerBody | None = None


class CreateSamplingSession(Body):
    """``create_sampling_session``"""

    session_id: str
    sampling_session_seq_id: int = 0
    base_model: str | None = None
    model_path: str | None = None


class TokenChunk(Body):
    """A run of tokens of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(Body):
    """A prompt in runs of tokens."""

    chunks: list[TokenChunk]


class SamplingBody(Body):
    """How to sample."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TensorBody(Body):
    """A tensor as JSON, dense or in compressed rows."""

    data: list[int] | list[float]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleRequest(Body):
    """``asample``"""

    prompt: ModelInput
    sampling_params: SamplingBody = SamplingBody()
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None


class RequestId(Body):
    """``retrieve_future``, ``cancel_future``"""

    request_id: str


class TinkerPath(Body):
    """``weights_info``"""

    tinker_path: str


class CopyWeights(Body):
    """``copy_weights``"""

    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0, lt=10**9)
    ttl_seconds: int | None = None


class Ttl(Body):
    """``checkpoints/.../ttl``"""

    ttl_seconds: int | None = None
