"""The controller's part of a checkpoint: what it needs to continue exactly where it was. How directories are kept whole is
`trainer.run.checkpoints`; weights, moments and random states are the learner ranks' part.

    config.yaml           the configuration of the attempt that wrote the checkpoint
    trainer.json          counts, data position, slots of the buffer in order, state of the advantage estimator, policy
                          version and checksum, wandb id
    buffer.safetensors    finished trajectories that wait for training
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rlframe.config import ConfigError
from rlframe.types import Batch, Trajectory
from trainer.run.buffer import State
from trainer.run.prompts import PromptStream
from trainer.settings.compose import to_yaml
from trainer.watch.step_metrics import staleness
from workers.rollout.group import Continuation

if TYPE_CHECKING:
    from trainer.run.controller import Controller


class Phase(Enum):
    """Where in a step the learner is, as far as a checkpoint is concerned."""

    BETWEEN = "between"
    """All that was taken from the buffer has been learned."""
    TAKEN = "taken"
    """A batch was taken and nothing has been learned from it: the state is that of the step before."""
    UPDATING = "updating"
    """Some sessions have moved and others have not: there is nothing that could be saved."""


def snapshot(controller: Controller) -> Callable[[Path], list[Path]]:
    """Copy what the controller needs to continue after the last learned step; the function returned writes it, from any thread.

    A batch that was taken and not learned from goes back to its place. The rest of an episode that was cut is not saved, since
    another process could not continue its environment; whoever restores this counts it as lost. Trajectories are not copied:
    nothing changes them once they are finished (values and advantages of a batch are in arrays of its own).
    """
    taken = controller.phase is Phase.TAKEN
    held = controller.buffer.slots(State.ISSUED, State.FINISHED, *([State.TRAINING] if taken else []))
    slots = [slot for slot in held if slot.state is not State.ISSUED or not isinstance(slot.prompt, Continuation)]
    lost_rests = len(held) - len(slots) + len(controller.continuations)
    state = {
        "step": controller.step_done,
        "version": controller.version,
        "checksum": controller.served,
        "position": controller.stream.position,
        "returned": controller.stream.returned,
        "prompts": controller.stream.fingerprint,
        "advantage": controller.estimator_before if taken else deepcopy(controller.estimator.state_dict()),
        "faults": dict(controller.faults.counts),
        "lost_rests": lost_rests,
        "dropped": controller.buffer.dropped,
        "wandb_id": controller.tracker.wandb_id,
        "slots": [{"index": slot.prompt.index, "finished": slot.state is not State.ISSUED} for slot in slots],
    }
    batches = [slot.result for slot in slots if slot.state is not State.ISSUED and slot.result is not None]
    config = to_yaml(controller.config)
    return lambda directory: write_state(directory, state, batches, config)


def write_state(directory: Path, state: dict[str, Any], batches: list[Batch], config: str) -> list[Path]:
    """Write the files of the module's docstring; ``batches`` are those of the finished slots, in order."""
    paths = [directory / "config.yaml", directory / "trainer.json"]
    if batches:
        joined = Batch.concat(batches)
        rest = {name: column for name, column in joined.columns.items() if isinstance(column, list)}
        arrays = {name: column for name, column in joined.columns.items() if name not in rest}
        paths.append(directory / "buffer.safetensors")
        save_file({"offsets": joined.offsets, **arrays}, str(paths[-1]))
        state = state | {"buffer": rest | {"sizes": [len(batch) for batch in batches]}}
    paths[0].write_text(config, "utf-8")
    paths[1].write_text(json.dumps(state))
    return paths


def restore(controller: Controller, directory: Path) -> None:
    """Put `snapshot`'s state back; finished trajectories keep their place, prompts in flight are issued again.

    Where the settings of the buffer have changed, what no longer fits is sampled again, and a sentence says how much that is.
    """
    state = read_state(directory)
    controller.resumed = True
    controller.step, controller.version = state["step"], state["version"]
    stream, buffer = controller.stream, controller.buffer
    stream.position, stream.returned = state["position"], []
    controller.estimator.load_state_dict(state["advantage"])
    controller.faults.counts |= state["faults"]
    controller.faults.counts["lost_rests"] += state.get("lost_rests", 0)
    buffer.dropped = state["dropped"]
    batches = read_batches(directory)
    results = iter(batches)
    held = [(stream.prompt(slot["index"]), next(results) if slot["finished"] else None) for slot in state["slots"]]
    rest = buffer.refill(held, lambda batch: int(staleness(batch, controller.version).max(initial=0)))
    # A later piece that is too stale is not sampled again: earlier ones of its episode were trained on, or wait here.
    later = [result is not None and bool(result.piece.any()) for _, result in held]
    for slot in buffer.slots(State.ISSUED):
        if later[slot.number]:
            buffer.drop(slot.number)
            controller.faults.counts["lost_rests"] += 1
    rest = [prompt for prompt, is_later in zip(rest, later[len(held) - len(rest) :], strict=True) if not is_later]
    stream.returned = [prompt.index for prompt in rest] + state.get("returned", [])
    again = len(batches) - len(buffer.slots(State.FINISHED))
    if again or rest:
        controller.tracker.say(
            f"{again} finished prompts do not fit max_staleness={buffer.max_staleness} and a buffer of {buffer.capacity} and "
            f"are sampled again; {len(rest)} prompts wait for a free slot."
        )


def held_out_by_tokens(directory: Path) -> bool:
    """Whether the run holds out problems by what they render to, as all did before checkpoints compared rows."""
    prompts = read_state(directory)["prompts"]
    return isinstance(prompts, str) or bool(prompts["held_out_by_tokens"])


def check_prompts(directory: Path, stream: PromptStream) -> None:
    """Refuse to continue with other prompts: a position in the stream would mean another prompt.

    Raises:
        ConfigError: the training prompts are not those of the checkpoint.
    """
    then = read_state(directory)["prompts"]
    if isinstance(then, str):
        same = then == stream.legacy_fingerprint
        what = None if same else "have other names or tokens (its version compared the name of the file and what it renders to)"
    else:
        what = stream.difference(then)
    if what:
        raise ConfigError(
            f"The training prompts {what}, compared with those that {directory.name} was written with, so the run cannot "
            "continue with them; give it the old ones (task.train may lie elsewhere), or start another run from an export."
        )


def read_state(directory: Path) -> dict[str, Any]:
    """The JSON part of the controller's state."""
    state: dict[str, Any] = json.loads((directory / "trainer.json").read_text())
    if "running_mean" in state:  # of versions in which that was the only estimator with a state
        state["advantage"] = state.pop("running_mean")
    return state


def read_batches(directory: Path) -> list[Batch]:
    """The trajectories of every finished slot, in order."""
    rest = read_state(directory).get("buffer")
    if rest is None:
        return []
    sizes = rest.pop("sizes")
    arrays: dict[str, Any] = load_file(str(directory / "buffer.safetensors"))
    written = arrays | rest
    for name, column in Batch.schema().items():
        if column.per == "trajectory" and not column.added and name not in written:  # of versions before it
            written[name] = np.full(len(arrays["offsets"]) - 1, getattr(Trajectory, column.field), column.dtype)
    joined = Batch(**written)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    return [joined.select(np.arange(start, end)) for start, end in pairwise(edges)]
