"""From overrides to one `rlframe.config.Config`: Hydra's groups and grammar, our errors.

Hydra composes the groups under ``configs/``; it never sees the command line, changes no directory and writes no output.
Whether the result makes sense is decided in `rlframe.checks`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from rlframe.checks import check, unused
from rlframe.config import Config, ConfigError
from trainer.presets import configs_dir

_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def options() -> dict[str, list[str]]:
    """Every group with its options, in alphabetical order."""
    groups = sorted(path for path in configs_dir().iterdir() if path.is_dir())
    return {group.name: sorted(path.stem for path in group.glob("*.yaml")) for group in groups}


def compose(overrides: Sequence[str] = ()) -> Config:
    """The resolved and checked job that ``overrides`` (Hydra's grammar, e.g. ``algorithm=sao actor.optim.lr=1e-5``) describe.

    ``model.path=FOLDER`` without a choice of ``model`` means ``model=local``.

    Raises:
        ConfigError: an unknown key, group or option; a value of the wrong type; a combination that is not defined; a
            setting that has no effect in this job.
    """
    parsed = [_parse(text) for text in overrides]
    chosen = {override.key_or_group for override in parsed}
    if "model.path" in chosen and "model" not in chosen:
        parsed.insert(0, _parse("model=local"))
    lines = [_accept(override) for override in parsed]
    _register_schema()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(configs_dir()), job_name="rlframe"):
            config = _to_config(hydra_compose("config", overrides=lines))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, parsed)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"A file under {configs_dir()} is not YAML: {' '.join(str(error).split())}.") from None
    check(config)
    _refuse_unused(config, chosen)
    return config


def load_yaml(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The job that `to_yaml` wrote to ``path``, with ``overrides`` of single settings; not yet checked.

    Raises:
        ConfigError: the file is missing or not YAML, it or an override has a key or value that the schema does not have, or
            an override chooses a group's option.
    """
    try:
        loaded = OmegaConf.load(path)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a configuration: {str(error).splitlines()[0]}.") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path} is not a configuration: it is not a mapping of settings.")
    for key in _leaves(OmegaConf.to_container(loaded)):
        _require_setting(key)
    given: dict[str, Any] = {}
    for override in map(_parse, overrides):
        key = override.key_or_group
        _accept(override)
        if key in options():
            raise ConfigError(f"{key} was chosen when the run began; override single settings, such as {key}.{_example(key)}.")
        given[key] = override.value()
    try:
        composed = OmegaConf.merge(OmegaConf.structured(Config), loaded)
        for key, value in given.items():
            OmegaConf.update(composed, key, value, force_add=_require_setting(key))
        return _to_config(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain_value(error, given)) from None


def to_yaml(config: Config) -> str:
    """The whole job as YAML, every setting written out."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


@functools.cache
def _register_schema() -> None:
    ConfigStore.instance().store(name="schema", node=Config)


def _to_config(composed: Any) -> Config:
    assert isinstance(composed, DictConfig)
    try:
        OmegaConf.resolve(composed)
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain_value(error, None)) from None
    assert isinstance(config, Config)
    return config


def _parse(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_overrides([_quote_band(text)])[0]
    except HydraException:
        raise ConfigError(
            f"{text!r} is not an override; write key=value, with quotes around values that hold spaces or commas."
        ) from None
    if override.is_sweep_override():
        raise ConfigError(f"{override.key_or_group} takes one value; write a list as {override.key_or_group}=[a,b].")
    return override


def _quote_band(text: str) -> str:
    """Keep a band ``lo_hi`` a string: unquoted, the grammar reads ``0.5_5`` as the number 0.55."""
    return re.sub(r"^(\S*threshold=)([\d.]+_[\d.]+)$", r"\1'\2'", text)


def _accept(override: Override) -> str:
    """The override as a line for Hydra, once its key (and its option, for a group) is known to exist."""
    key, groups = override.key_or_group, options()
    line = override.input_line or ""
    if line.startswith("~") or override.package is not None:
        raise ConfigError(
            f"{line!r} is not an override that makes sense here; write key=value, or key=null to switch a setting off."
        )
    choice = override.value()
    if key in groups and isinstance(choice, str):
        if choice not in groups[key]:
            raise ConfigError(_unknown(f"{key}={choice}", "an option", choice, groups[key], f"{key}="))
        return line
    if key in groups and not isinstance(choice, dict):
        raise ConfigError(f"{key} is a group; choose one of {', '.join(groups[key])}.")
    plain = line.lstrip("+")
    return f"++{plain}" if _require_setting(key) else plain


def _require_setting(key: str) -> bool:
    """Whether ``key`` is, or lies inside, a free-form dictionary; raises where the schema has no such setting."""
    here: Any = Config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not dataclasses.is_dataclass(here):
            if typing.get_origin(here) is dict:
                return True
            raise ConfigError(f"{key} is not a setting; {'.'.join(parts[:depth])} is a single value.")
        hints = typing.get_type_hints(here)
        if part not in hints:
            raise ConfigError(_unknown(key, "a setting", key, _settings(), ""))
        here = hints[part]
    return typing.get_origin(here) is dict


def _settings(of: Any = Config, prefix: str = "") -> list[str]:
    """All keys of the schema, sections included."""
    keys = []
    for name, hint in typing.get_type_hints(of).items():
        keys.append(prefix + name)
        if dataclasses.is_dataclass(hint):
            keys += _settings(hint, f"{prefix}{name}.")
    return keys


def _unknown(what: str, kind: str, word: str, known: Iterable[str], prefix: str) -> str:
    """One sentence that refuses ``what`` and names the nearest right one."""
    known = list(known)
    last = word.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.75) or [key for key in known if key.rsplit(".", 1)[-1] == last]
    near = near or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if near:
        return f"{what} is not {kind}; did you mean {prefix}{near[0]}?"
    listed = known if len(known) < 30 else [key for key in known if "." not in key]
    return f"{what} is not {kind}; there are {', '.join(listed)}."


def _leaves(tree: Any, prefix: str = "") -> list[str]:
    if not isinstance(tree, dict) or not tree:
        return [prefix.rstrip(".")] if prefix else []
    return [leaf for name, value in tree.items() for leaf in _leaves(value, f"{prefix}{name}.")]


def _explain(error: Exception, parsed: Sequence[Override]) -> str:
    """One sentence for what Hydra raised while merging."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return str(error).splitlines()[0]
    return _explain_value(cause, {override.key_or_group: override.value() for override in parsed})


def _explain_value(error: OmegaConfBaseException, given: dict[str, Any] | None) -> str:
    """Name the key, the value and the type that was wanted."""
    key = error.full_key or str(error.key)
    value = f" is {given[key]!r}" if given and key in given else ""
    if isinstance(error, InterpolationResolutionError):
        return f"A value refers to something that is not a setting: {str(error).splitlines()[0]}."
    wanted = _wanted(key)
    if wanted is None:
        return _unknown(key, "a setting", key, _settings(), "")
    return f"{key}{value}, but it must be {wanted}." if value else f"{key} must be {wanted} ({str(error).splitlines()[0]})."


def _example(section: str) -> str:
    """A setting inside ``section``."""
    return min((name for name in _settings() if name.startswith(f"{section}.")), key=len).removeprefix(f"{section}.")


def _wanted(key: str) -> str | None:
    """The type of a setting in words."""
    here: Any = Config
    for part in key.split("."):
        here = typing.get_type_hints(here).get(part) if dataclasses.is_dataclass(here) else None
    if dataclasses.is_dataclass(here):
        return f"a section; set its parts, such as {key}.{_example(key)}"
    inner = [arg for arg in typing.get_args(here) if arg is not type(None)]
    if typing.get_origin(here) is list:
        return f"a list, [{', '.join(_WANTED.get(arg, 'a value') for arg in inner)}, ...]"
    if typing.get_origin(here) is dict:
        return "a dictionary, {name: value}"
    if type(None) in typing.get_args(here):
        return f"{_WANTED[inner[0]]} or null"
    return _WANTED.get(here)


def _refuse_unused(config: Config, given: Iterable[str]) -> None:
    for key in given:
        for prefix, reason in unused(config).items():
            if key == prefix or key.startswith(f"{prefix}."):
                raise ConfigError(f"{key} has no effect {reason}; leave it out.")
