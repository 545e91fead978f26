"""Why a run ends early. Settings that are refused are `rlframe.config.ConfigError`."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """The run cannot continue; the message says why in one sentence."""


class CheckpointError(RunFailed):
    """A checkpoint cannot be written, or none can be used."""


class WorkerDied(RunFailed):
    """A process of the run is gone; another attempt from the last checkpoint may succeed."""


class LearnerDied(WorkerDied):
    """A learner rank is gone, and with it what was learned since the last checkpoint."""
