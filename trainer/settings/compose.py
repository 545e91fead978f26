"""From overrides to one `Config`, and from there to ``config.yaml`` and back: Hydra's groups, our errors.

Hydra composes the groups under ``configs/``; it never sees the command line, changes no directory and writes no output.
`trainer.settings.overrides` reads single overrides, `trainer.settings.checks` checks the result.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from rlframe.config import ConfigError
from trainer.settings.checks import check, check_ranges
from trainer.settings.config import Config
from trainer.settings.overrides import Given, example, inside_dictionary, parse, settings, unknown, wanted_type
from trainer.settings.presets import configs_dir
from trainer.settings.redact import hidden_names, without_secrets
from trainer.settings.renamed import REMOVED, RENAMED, name_bands, refuse_torn_bands, rename
from trainer.settings.unused import unused


def options() -> dict[str, list[str]]:
    """Every group with its options, in alphabetical order."""
    groups = sorted(path for path in configs_dir().iterdir() if path.is_dir())
    return {group.name: sorted(path.stem for path in group.glob("*.yaml")) for group in groups}


def compose(overrides: Sequence[str] = (), elsewhere: bool = False) -> Config:
    """The resolved and checked job that ``overrides`` (e.g. ``algorithm=sao actor.optim.lr=1e-5``) describe.

    ``model.path=FOLDER`` without a choice of ``model`` means ``model=local``.

    Args:
        overrides: settings and choices.
        elsewhere: the job runs on another machine, which alone may have the modules that it names (see `_check`).

    Raises:
        ConfigError: an unknown key, group or option; a value of the wrong type; a combination that is not defined; a
            setting that has no effect in this job.
    """
    groups = options()
    given = [parse(text, groups) for text in overrides]
    chosen = {one.key for one in given}
    if "model.path" in chosen and "model" not in chosen:
        given.insert(0, parse("model=local", groups))
    _register_schema()
    refuse_torn_bands(configs_dir())
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(configs_dir()), job_name="rlframe"):
            composed = hydra_compose("config", overrides=[one.line for one in given if one.line])
        _set(composed, [one for one in given if one.line is None])
        config = _to_config(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, given)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"A file under {configs_dir()} is not YAML: {' '.join(str(error).split())}.") from None
    _check(config, chosen, elsewhere)
    return config


def _check(config: Config, given: Iterable[str], elsewhere: bool) -> None:
    """Refuse what makes no sense. A job for elsewhere that names a module is not imported: only ranges are looked at here."""
    if elsewhere and any(":" in name for name in _imported(config)):
        return check_ranges(config)
    check(config)
    _refuse_unused(config, given)


def _imported(config: Config) -> tuple[str, ...]:
    """What `check` imports where it is ``module:name``."""
    return config.rollout.engine, config.algorithm.policy_loss, config.algorithm.advantage


def resumed(run: str | Path, overrides: Sequence[str], elsewhere: bool = False) -> Config:
    """The checked job of the run in ``run``, with ``overrides`` of single settings; ``elsewhere`` as in `compose`.

    Raises:
        ConfigError: as `compose` and `load_yaml`; or a secret of the run, which its ``config.yaml`` does not keep, is not
            given again.
    """
    given = {parse(text, options()).key for text in overrides}
    if "run_dir" in given:
        raise ConfigError("run_dir has no effect on a resumed run; move its folder and give the new path.")
    config = load_yaml(Path(run) / "config.yaml", overrides)
    config.run_dir = str(run)
    _check(config, given, elsewhere)
    for key in hidden_names(dataclasses.asdict(config)):
        raise ConfigError(f"{key} holds a secret, which {run}/config.yaml does not keep; give it again, as {key}=...")
    return config


def load_yaml(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The job that `to_yaml` wrote to ``path``, with ``overrides`` of single settings; not yet checked.

    Raises:
        ConfigError: the file is missing or not YAML, it or an override has a key or value that the schema does not have, or
            an override chooses a group's option.
    """
    try:
        loaded = _read(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a configuration: {str(error).splitlines()[0]}.") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} is not a configuration: it is not a mapping of settings.")
    for key in REMOVED:
        section, _, name = key.rpartition(".")
        if isinstance(loaded.get(section), dict):
            loaded[section].pop(name, None)
    for key in _leaves(loaded):
        inside_dictionary(key)
    groups = options()
    for override in overrides:
        key = override.partition("=")[0].lstrip("+")
        if key in groups:
            raise ConfigError(f"{key} was chosen when the run began; override single settings, such as {key}.{example(key)}.")
    given = [parse(text, groups) for text in overrides]
    try:
        composed = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(_texts(loaded, _literal)))
        _set(composed, given)
        return _to_config(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain_value(error, {one.key: one.value for one in given})) from None


def to_yaml(config: Config) -> str:
    """The whole job as YAML, every setting written out; ``***`` stands for secrets."""
    tree = without_secrets(dataclasses.asdict(config))
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)


def _set(composed: Any, given: Sequence[Given]) -> None:
    """Set values without Hydra's grammar; ``${key}`` in them stands for another setting."""
    for one in given:
        value = _texts(one.value, lambda text: re.sub(r"\$\{(?![\w.]+\})", "$\0{", text) if text != "???" else _literal(text))
        OmegaConf.update(composed, one.key, value, force_add=inside_dictionary(one.key))


def _texts(tree: Any, change: Callable[[str], str]) -> Any:
    """A copy of a tree of dictionaries, lists and dataclasses with every text changed."""
    if isinstance(tree, dict):
        return {name: _texts(value, change) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_texts(value, change) for value in tree]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = {field.name: _texts(getattr(tree, field.name), change) for field in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **parts)
    return change(tree) if isinstance(tree, str) else tree


def _literal(text: str) -> str:
    """Keep OmegaConf from interpreting a text; a NUL, which no setting has, marks the place."""
    return "?\0??" if text == "???" else text.replace("${", "$\0{")


@functools.cache
def _register_schema() -> None:
    ConfigStore.instance().store(name="schema", node=Config)


def _to_config(composed: Any) -> Config:
    assert isinstance(composed, DictConfig)
    name_bands(composed)
    try:
        OmegaConf.resolve(composed)
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain_value(error, None)) from None
    assert isinstance(config, Config)
    return _texts(config, lambda text: text.replace("\0", ""))


class _Dumper(yaml.SafeDumper):
    """Quotes a text that a reader of YAML, ours or another one, would take for a number, a date or a truth value."""

    def represent_str(self, text: str) -> yaml.Node:
        """In double quotes where a character is not printable: of the other styles, a reader folds unusual line ends."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


class _Loader(yaml.SafeLoader):
    """Dates are text, and ``1e-5`` is a number, as in YAML 1.2."""


_EXPONENT = ("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))
_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_implicit_resolver(*_EXPONENT)
_Loader.add_implicit_resolver(*_EXPONENT)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
    for first, found in _Loader.yaml_implicit_resolvers.items()
}


def _read(text: str) -> Any:
    """Parse YAML; a plain scalar of a setting that is text stays text, whatever it looks like."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        rename(node)
        _mark_texts(node, Config)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _mark_texts(node: yaml.Node, hint: Any) -> None:
    arguments = typing.get_args(hint)
    if isinstance(node, yaml.MappingNode) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        for name, value in node.value:
            _mark_texts(value, hints.get(name.value))
    elif isinstance(node, yaml.SequenceNode) and arguments == (str,):
        for value in node.value:
            _mark_texts(value, str)
    elif isinstance(node, yaml.ScalarNode) and (hint is str or str in arguments) and not node.tag.endswith(":null"):
        node.tag = "tag:yaml.org,2002:str"
    elif isinstance(node, yaml.ScalarNode) and hint is Any and "_" in node.value:
        node.tag = "tag:yaml.org,2002:str"  # a band in its old form, which YAML 1.1 would read as the number 0.55


def _leaves(tree: Any, prefix: str = "") -> list[str]:
    if not isinstance(tree, dict) or not tree:
        return [prefix.rstrip(".")] if prefix else []
    return [leaf for name, value in tree.items() for leaf in _leaves(value, f"{prefix}{name}.")]


def _explain(error: Exception, given: Sequence[Given]) -> str:
    """One sentence for an error that Hydra raised while merging."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return str(error).splitlines()[0]
    return _explain_value(cause, {one.key: one.value for one in given})


def _explain_value(error: OmegaConfBaseException, given: dict[str, Any] | None) -> str:
    """Name the key, the value and the type that was wanted."""
    key = error.full_key or str(error.key)
    value = f" is {given[key]!r}" if given and key in given else ""
    if isinstance(error, InterpolationResolutionError):
        return f"A value refers to something that is not a setting: {str(error).splitlines()[0]}."
    wanted = wanted_type(key)
    if wanted is None:
        for old, new in RENAMED.items():
            if key == old or key.startswith(f"{old}."):
                return f"{key} is called {new + key.removeprefix(old)} now; write that."
        return unknown(key, "a setting", key, settings(), "")
    return f"{key}{value}, but it must be {wanted}." if value else f"{key} must be {wanted} ({str(error).splitlines()[0]})."


def _refuse_unused(config: Config, given: Iterable[str]) -> None:
    for key in given:
        for prefix, reason in unused(config).items():
            if key == prefix or key.startswith(f"{prefix}."):
                raise ConfigError(f"{key} has no effect {reason}; leave it out.")
