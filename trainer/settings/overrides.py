"""One override of the command line: which setting it names, and its value by the type that the schema declares.

Text is taken as it stands, numbers, lists and dictionaries in Hydra's grammar. Groups and files: `trainer.settings.compose`.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from rlframe.config import ConfigError
from rlframe.config.validate import nearest
from trainer.settings.config import Config
from trainer.settings.renamed import REMOVED, current

ALIASES = {
    "learning_rate": "lr",
    "lora_r": "rank",
    "lora_rank": "rank",
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "grad_clip": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "adam_epsilon": "eps",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "num_warmup_steps": "warmup_steps",
    "lr_warmup_steps": "warmup_steps",
    "gradient_checkpointing": "activation_checkpointing",
    "num_steps": "steps",
    "max_steps": "steps",
    "n_steps": "steps",
    "iterations": "steps",
    "bs": "batch_size",
    "train_batch_size": "batch_size",
    "n_gpus": "actor.gpus",
    "num_gpus": "actor.gpus",
    "num_workers": "rollout.workers",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "max_tokens": "max_new_tokens",
    "max_response_length": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "max_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "context_length": "max_model_len",
    "temp": "rollout.temperature",
    "n": "rollouts_per_prompt",
    "group_size": "rollouts_per_prompt",
    "num_generations": "rollouts_per_prompt",
    "staleness": "max_staleness",
    "output_dir": "run_dir",
    "run_name": "name",
    "experiment_name": "name",
    "model_path": "model.path",
    "model_name_or_path": "model.path",
    "base_model": "model.path",
    "dataset": "task.train",
    "train_file": "task.train",
    "train_files": "task.train",
    "eval_file": "task.eval",
    "val_files": "task.eval",
    "reward_fn": "task.reward",
    "reward_function": "task.reward",
    "save_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "eval_every": "eval.every",
    "eval_steps": "eval.every",
    "wandb_project": "log.project",
    "project_name": "log.project",
}
"""Names that other frameworks give to a setting -> the end of ours."""
_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


@dataclasses.dataclass(frozen=True)
class Given:
    """An override whose key exists."""

    key: str
    """Setting, section or group."""
    value: Any
    """What it is set to; of a group, the option."""
    line: str | None = None
    """For Hydra; None: ``value`` is set as it stands."""


def parse(text: str, groups: Mapping[str, Sequence[str]]) -> Given:
    """Read ``key=value``.

    Args:
        text: as typed.
        groups: every group with its options.

    Raises:
        ConfigError: it is no override, its key or option does not exist, or a text is empty.
    """
    key, equals, raw = text.partition("=")
    key = re.sub(r"^\+{1,2}", "", key)
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.-]*", key):
        _hydra(text)  # says what is wrong with what is not an override at all
        raise ConfigError(f"{text!r} is not an override that makes sense here; write key=value, or key=null to switch it off.")
    key = current(key)
    if "\0" in raw or re.search("[\ud800-\udfff]", raw):
        raise ConfigError(f"{key} is not text: it has bytes that are not UTF-8, or a NUL.")
    if key in groups:
        return _choice(key, raw, groups[key])
    free = inside_dictionary(key)
    hint = Any if free else _declared(key)
    if hint in (str, typing.Optional[str]):
        optional = hint is not str
        return Given(key, None if optional and raw == "null" else _text(key, raw, " (or null)" if optional else ""))
    of = typing.get_args(hint) if typing.get_origin(hint) is list else ()
    if of in ((str,), (Any,)) and re.fullmatch(r"\s*\[.*\]\s*", raw, re.DOTALL):
        return Given(key, _items(raw.strip()[1:-1], numbers=of == (Any,)))
    if hint is Any:
        return _anything(key, raw, free)
    override = _hydra(f"{key}={raw}", key)
    _refuse_numbers_for_text(hint, override.value(), key)
    return Given(key, override.value(), f"++{key}={raw}" if typing.get_origin(hint) is dict else f"{key}={raw}")


def _choice(key: str, raw: str, known: Sequence[str]) -> Given:
    """An option of a group, or several settings of it as a dictionary."""
    try:
        choice = _hydra(f"{key}={raw}", key).value()
    except ConfigError:
        choice = raw
    if isinstance(choice, dict):
        _refuse_numbers_for_text(_declared(key), choice, key)
        return Given(key, choice, f"{key}={raw}")
    if not isinstance(choice, str):
        raise ConfigError(f"{key} is a group; choose one of {', '.join(known)}.")
    if choice not in known:
        if key == "model" and "/" in choice:
            raise ConfigError(f"model={choice} is not an option; for a folder write model.path={choice}.")
        raise ConfigError(unknown(f"{key}={choice}", "an option", choice, known, f"{key}="))
    return Given(key, choice, f"{key}={raw}")


def _anything(key: str, raw: str, free: bool) -> Given:
    """A setting without a declared type: a number, a list or a dictionary where it reads as one, else text."""
    if re.fullmatch(r"[\d.]+_[\d.]+", raw) and not free:
        return Given(key, raw)  # a band in its old form, which the grammar would read as the number 0.55
    if not raw.strip():
        raise ConfigError(f"{key}= is empty; give it a value, or '' for an empty text.")
    try:
        override = _hydra(f"{key}={raw}", key)
    except ConfigError:
        if raw[0] in "[{'\"" or _is_list(raw):
            raise
        return Given(key, raw)
    return Given(key, override.value(), f"++{key}={raw}" if free else f"{key}={raw}")


def _is_list(raw: str) -> bool:
    return re.fullmatch(r"[\w.]+(,[\w.]+)+", raw) is not None


def _text(key: str, raw: str, also: str = "") -> str:
    text = _unquoted(raw)
    if not text.strip():
        raise ConfigError(f"{key}= is empty; give it a value{also}.")
    return text


def _unquoted(raw: str) -> str:
    """Without the quotes around the whole, as Hydra takes them off."""
    for quote in "'\"":
        if len(raw) > 1 and raw[0] == raw[-1] == quote and not re.search(rf"(?<!\\){quote}", raw[1:-1]):
            return raw[1:-1].replace(f"\\{quote}", quote)
    return raw


def _items(inside: str, numbers: bool) -> list[Any]:
    """The texts of ``[a, 'b, c']``; with ``numbers``, a whole number without quotes is one."""
    found = re.findall(r"\s*('(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|[^,]*)\s*(?:,|$)", inside)
    items = [item.strip() for item in found if item.strip()]
    return [int(item) if numbers and re.fullmatch(r"-?[0-9]+", item) else _unquoted(item) for item in items]


def _hydra(text: str, key: str = "") -> Override:
    """One override in Hydra's grammar."""
    try:
        override = OverridesParser.create().parse_overrides([text])[0]
    except HydraException:
        wanted = wanted_type(key) if key else None
        if wanted and wanted != "anything":
            raise ConfigError(f"{key} is {text.partition('=')[2]!r}, but it must be {wanted}.") from None
        raise ConfigError(
            f"{text!r} is not an override; write key=value, with quotes around values that begin with a bracket or a quote."
        ) from None
    if override.is_sweep_override():
        raise ConfigError(f"{override.key_or_group} takes one value; write a list as {override.key_or_group}=[a,b].")
    return override


def _refuse_numbers_for_text(hint: Any, value: Any, key: str) -> None:
    """In a dictionary, the grammar reads ``{name: 1.10}`` as a number: what is text has to be quoted there."""
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = typing.get_type_hints(hint)
        for name, inner in value.items():
            if str(name) in hints:
                _refuse_numbers_for_text(hints[str(name)], inner, f"{key}.{name}")
    elif hint in (str, typing.Optional[str]) and isinstance(value, int | float):
        raise ConfigError(f"{key} is text and {value} is a number; write {key}=... on its own, or quotes around it.")


def inside_dictionary(key: str) -> bool:
    """Whether ``key`` lies inside a free-form dictionary.

    Raises:
        ConfigError: the schema has no such setting.
    """
    if key in REMOVED:
        raise ConfigError(f"{key} is gone, since {REMOVED[key]}; leave it out.")
    here: Any = Config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not dataclasses.is_dataclass(here):
            if typing.get_origin(here) is dict:
                return True
            raise ConfigError(f"{key} is not a setting; {'.'.join(parts[:depth])} is a single value.")
        hints = typing.get_type_hints(here)
        if part not in hints:
            raise ConfigError(unknown(key, "a setting", key, settings(), ""))
        here = hints[part]
    return False


def _declared(key: str) -> Any:
    """The type that the schema declares for a key, None where it has none."""
    here: Any = Config
    for part in key.split("."):
        here = typing.get_type_hints(here).get(part) if dataclasses.is_dataclass(here) else None
    return here


def settings(of: Any = Config, prefix: str = "") -> list[str]:
    """All keys of the schema, sections included."""
    keys = []
    for name, hint in typing.get_type_hints(of).items():
        keys.append(prefix + name)
        if dataclasses.is_dataclass(hint):
            keys += settings(hint, f"{prefix}{name}.")
    return keys


def unknown(what: str, kind: str, word: str, known: Iterable[str], prefix: str) -> str:
    """One sentence that refuses ``what`` and names the nearest right one."""
    known = list(known)
    last = word.rsplit(".", 1)[-1]
    near = _other_name(word, known) or nearest(word, known, cutoff=0.75)
    near = near or next((key for key in known if key.rsplit(".", 1)[-1] == last), None)
    near = near or nearest(word, known, cutoff=0.5)
    if near:
        return f"{what} is not {kind}; did you mean {prefix}{near}?"
    listed = known if len(known) < 30 else [key for key in known if "." not in key]
    return f"{what} is not {kind}; there are {', '.join(listed)}."


def _other_name(word: str, known: list[str]) -> str | None:
    """Our name for ``word``, in the section nearest to the one that was typed."""
    ours = ALIASES.get(word.rsplit(".", 1)[-1])
    candidates = [key for key in known if ours and f".{key}".endswith(f".{ours}")]
    typed = word.split(".")[:-1]
    return max(candidates, key=lambda key: sum(part in typed for part in key.split(".")[:-1]), default=None)


def example(section: str) -> str:
    """A setting inside ``section``."""
    return min((name for name in settings() if name.startswith(f"{section}.")), key=len).removeprefix(f"{section}.")


def wanted_type(key: str) -> str | None:
    """The type of a setting in words; None where there is no such setting."""
    here = _declared(key)
    if here is Any:
        return "anything"
    if dataclasses.is_dataclass(here):
        return f"a section; set its parts, such as {key}.{example(key)}"
    inner = [arg for arg in typing.get_args(here) if arg is not type(None)]
    if typing.get_origin(here) is list:
        return f"a list, [{', '.join(_WANTED.get(arg, 'a value') for arg in inner)}, ...]"
    if typing.get_origin(here) is dict:
        return "a dictionary, {name: value}"
    if type(None) in typing.get_args(here):
        return f"{_WANTED[inner[0]]} or null"
    return _WANTED.get(here)
