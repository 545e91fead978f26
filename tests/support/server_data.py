"""Data and small helpers of the server's tests."""

import numpy as np
from safetensors.torch import load_file
from tinker import types

from trainer.server import paths

VOCAB = 64
ADAM = types.AdamParams(learning_rate=1e-2, eps=0.1, weight_decay=0.1)
"""Gradients are of size 1 to 100; the large epsilon keeps entries that are rounding noise from being normalised to +-1."""


def policy_data(seed: int, count: int = 5, longest: int = 12) -> list[types.Datum]:
    """Data that any policy loss takes; targets are not the shifted inputs, so nothing can shift by accident."""
    rng = np.random.default_rng(seed)
    return [_policy_datum(rng, int(rng.integers(1, longest))) for _ in range(count)]


def _policy_datum(rng, length):
    return datum(
        rng.integers(0, VOCAB, length),
        target_tokens=rng.integers(0, VOCAB, length),
        logprobs=(-5 + rng.normal(size=length)).astype(np.float32),
        advantages=rng.normal(size=length).astype(np.float32),
    )


def supervised_data(seed: int, count: int = 5, longest: int = 12, targets: int = 0) -> list[types.Datum]:
    """Weights are real numbers, negative ones too; ``targets`` K per position, 0: a plain row."""
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        length = int(rng.integers(1, longest))
        shape = (length, targets) if targets else (length,)
        data.append(
            datum(
                rng.integers(0, VOCAB, length),
                target_tokens=rng.integers(0, VOCAB, shape),
                weights=rng.normal(size=shape).astype(np.float32),
            )
        )
    return data


def datum(tokens, **inputs) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([int(t) for t in tokens]),
        loss_fn_inputs={name: np.asarray(value) for name, value in inputs.items()},
    )


def without(data, *names):
    return [
        types.Datum(d.model_input, {key: value for key, value in d.loss_fn_inputs.items() if key not in names}) for d in data
    ]


def exported(server, client, name: str):
    """The folder of the client's adapter as it is now."""
    path = client.save_weights_for_sampler(name).result().path
    return server.service.store.folder(paths.parse(path))


def factors(server, client, name: str):
    return load_file(exported(server, client, name) / "adapter_model.safetensors")


def parameters(server, client):
    """Copies of all parameters of the session behind a training client."""
    return {name: p.detach().clone() for name, p in server.session(client).named_parameters()}
