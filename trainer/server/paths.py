"""Names of saved weights: ``tinker://<run>/<kind>/<name>``, and what may stand in them. No file is touched here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.server.errors import UserError

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""Kind in a path -> what the SDK calls it."""
_RUN = re.compile(r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,9}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,127}")


@dataclass(frozen=True)
class WeightsPath:
    """One saved state of one run."""

    run: str
    """Model id, ``<session>:train:<number>``."""
    kind: str
    """``weights`` (training continues from it) or ``sampler_weights`` (an adapter)."""
    name: str
    """Given by the client."""

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """The path within its run."""
        return f"{self.kind}/{self.name}"


def parse(path: str) -> WeightsPath:
    """Parse a path.

    Raises:
        UserError: it is not one; anything that could leave its folder is refused.
    """
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS or not _RUN.fullmatch(parts[0]):
        raise UserError(f"path={path!r} is not a path of saved weights; they look like {SCHEME}<run>/weights/<name>.")
    return WeightsPath(parts[0], parts[1], check_name(parts[2]))


def check_name(name: str) -> str:
    """Check that a name is a single, safe file name.

    Raises:
        UserError: it is not.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        raise UserError(
            f"path={name!r} cannot be the name of saved weights; use up to 128 letters, digits and _ . = + -, beginning with a "
            "letter, digit or _, without '..'."
        )
    return name


def check_run(run: str) -> str:
    """Check that a model id is a single, safe file name.

    Raises:
        UserError: it is not.
    """
    if not _RUN.fullmatch(run):
        raise UserError(f"model_id={run!r} is not the id of a model.", status=404)
    return run
