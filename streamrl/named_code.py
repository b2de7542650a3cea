"""Code, secrets and addresses that settings name: used only if the person at this keyboard has named them, too.

Settings come with data: a hub sends its own to all that join, a run directory and a bundle hold those of their author.
What they name by `package.module:attribute` or by a file is imported, which runs it; what they name as a URL is sent
to, with the key that they name as an environment variable. So each such name must stand in the words of the command
line: as a setting, or in `actors.allow`. `streamrl launch` gives its actors the names of its own settings.

The settings of a run that this user started need no words again. The files that hold them are signed with a key that
only this user can read; a file that was changed since then, or came from elsewhere, is somebody else's.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError

DATA_ONLY = frozenset((
    "actors.actor_id", "actors.allow", "actors.device", "actors.key", "checkpoint.directory", "data.answer_key",
    "data.chat_template", "data.chosen_key", "data.path", "data.prompt_key", "data.rejected_key",
    "data.system_prompt", "data.test_path", "env.task_field", "eval.directory", "hub.keys", "objectives.components",
    "objectives.ideal", "objectives.reference_point", "policy.tiny.cache_dir", "reward.format_tags",
    "reward.judge.model", "reward.judge.prompt", "reward.model.device", "reward.model.model", "reward.model.path",
    "rollout.test.sampling.stop", "rollout.train.sampling.stop", "run.device", "run.dir", "run.name", "run.root",
    "sweep.dir", "sweep.metric", "tracking.project",
))
"""Settings whose text is shown, compared, or read as a file of data, whatever it is. Every other text is a name if it
holds a colon, as `package.module:attribute`, a URL and an address do."""
ALWAYS = frozenset((
    "actors.endpoint.advertise", "env.agent", "env.agent_command", "env.path", "env.tool_use.documents",
    "hub.advertise",
))
"""Settings of which every text is a name, and so is that of any setting that ends with `_env`."""
OPTIONS = ("actors.vllm", "env.options", "tracking.options")
"""Options of others' code: what they import or run has a form that only they know; choices are single words."""
OF_ACTORS = ("actors", "data", "env", "eval", "reward", "rollout")
"""Sections that an actor takes over from its hub."""
_TABLES = ("env.tasks", "eval.datasets")
"""Sections by a name of the user's; below it the names of settings begin again."""
_SHORT = {"path": "data.path", "test_path": "data.test_path", "sampling": "rollout.test.sampling"}
"""Names in an entry of `eval.datasets` that stand for others."""
_LOOPBACK = ("127.0.0.1:", "tcp://127.0.0.1:", "[::1]:", "tcp://[::1]:")
_RUN_MARKS = ("EPOCH", "run.json", "run_id", "metrics.jsonl", "summary.json", "stream")


def named_code(settings: Mapping[str, Any], *, sections: Iterable[str] | None = None) -> Iterator[tuple[str, str]]:
    """(setting, name) of all code, secrets and addresses that these plain settings name; of some sections if given."""
    for section in settings if sections is None else sections:
        yield from _named(section, section, settings.get(section))


def _named(setting: str, shown: str, value: Any) -> Iterator[tuple[str, str]]:
    """The names in a value of `setting`, which stands in the settings as `shown`."""
    if setting in _TABLES and isinstance(value, Mapping):
        for name, entry in value.items():
            for key, inner in entry.items() if isinstance(entry, Mapping) else ():
                yield from _named(_SHORT.get(str(key), str(key)), f"{shown}.{name}.{key}", inner)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if is_name(setting, str(key)):
                yield shown, str(key)
            inside = _is_open(setting)
            yield from _named(setting if inside else f"{setting}.{key}", shown if inside else f"{shown}.{key}", inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _named(setting, shown, inner)
    elif isinstance(value, str) and is_name(setting, value):
        yield shown, value


def _is_open(setting: str) -> bool:
    return setting in OPTIONS or setting in DATA_ONLY or setting in ALWAYS


def is_name(setting: str, text: str) -> bool:
    """Whether a text of a setting names code, a secret or an address."""
    if setting in DATA_ONLY or not text:
        return False
    if setting in ALWAYS:
        return text != "outside"  # of env.agent: no agent that is started here
    if setting.endswith("_env"):
        return True
    if setting.endswith(".bind") and text.startswith(_LOOPBACK):
        return False
    return any(mark in text for mark in (".:/" if setting in OPTIONS else ":"))


def refuse_references(settings: Any, *, whose: str = "the hub's settings") -> None:
    """Raise ConfigError for a reference such as ${oc.env:HOME} in settings of others: it would read this machine's.

    A run's settings are written and sent as values, so honest ones hold none.
    """
    if reference := next((text for text in _texts(settings) if "${" in text), None):
        raise ConfigError(f"{whose} hold the reference {reference!r:.80}: leave ${{...}} out of them")


def check_allowed(settings: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ConfigError for the names in a hub's settings that this actor's own words do not allow."""
    if wanted := _unnamed(named_code(settings, sections=OF_ACTORS), [own]):
        raise ConfigError(
            f"the hub asks for {_listed(wanted)}, code or a secret of this machine or an address, which this actor may "
            f"not use: if you trust the hub, start the actor with {_word_for(wanted)}"
        )


def check_stored(told: Iterable[Mapping[str, Any]], own: Iterable[Mapping[str, Any]], whose: str) -> None:
    """Raise ConfigError for names in the settings of a run or bundle that the words of the command do not allow."""
    if wanted := _unnamed((name for one in told for name in named_code(one)), own):
        raise ConfigError(
            f"{whose} is not signed as a run of yours, and asks for {_listed(wanted)}, code or a secret of this "
            f"machine or an address, which you did not name: if you trust who made it, add {_word_for(wanted)}"
        )


def _unnamed(names: Iterable[tuple[str, str]], own: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    allowed: list[str] = []
    for settings in own:
        allowed += [name for _, name in named_code(settings)]
        if isinstance(actors := settings.get("actors"), Mapping):
            allow = actors.get("allow") or ()
            allowed += map(str, [allow] if isinstance(allow, str) else allow)
    return [
        (setting, name) for setting, name in dict.fromkeys(names)
        if name not in allowed and not (setting.endswith("env.path") and _same_file(name, allowed))
    ]


def _listed(wanted: list[tuple[str, str]]) -> str:
    return " and ".join(f"{setting}={name}" for setting, name in wanted)


def _word_for(wanted: list[tuple[str, str]]) -> str:
    return shlex.join(allow_words(name for _, name in wanted))


def allow_words(names: Iterable[str]) -> list[str]:
    """The word that allows these names; none if there are none."""
    unique = list(dict.fromkeys(names))
    return [f"actors.allow={json.dumps(unique, ensure_ascii=False)}"] if unique else []


def words_for_actors(settings: Mapping[str, Any]) -> list[str]:
    """The words that the actors of a run with these settings get on their command line."""
    return allow_words(name for _, name in named_code(settings, sections=OF_ACTORS))


def _same_file(path: str, allowed: list[str]) -> bool:
    return any(_resolved(path) == _resolved(one) for one in allowed if one.endswith(".py"))


def _resolved(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _texts(value: Any) -> Iterator[str]:
    """Every text in nested values, keys of mappings too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(key)
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


# --- whose a run is ---------------------------------------------------------------------------------------------------


def is_of_a_run(file: Path) -> bool:
    """Whether a settings file is that of a run directory, and no file of one's own."""
    return file.name == "config.yaml" and any((file.parent / mark).exists() for mark in _RUN_MARKS)


def sign(file: Path) -> None:
    """Sign a file of a run directory that this program has just written, for `is_own`.

    Where this user has no place for a key, as in some containers, nothing is signed: the words must name all then.
    """
    with suppress(OSError):
        key = _key()
        beside = _signature_of(file)
        draft = beside.with_name(f"{beside.name}.{os.getpid()}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(_code(key, file) + "\n")
        os.replace(draft, beside)


def is_own(file: Path) -> bool:
    """Whether this user's programs wrote this file of a run directory as it is, code in `inputs/` beside it included.

    The directory's name and the run's id are not in it: who copies the file can copy those, too.
    """
    try:
        return hmac.compare_digest(_signature_of(file).read_text().strip(), _code(_key(), file))
    except (OSError, ValueError, TypeError):
        return False


def _signature_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.signature")


def _code(key: bytes, file: Path) -> str:
    """The authentication code of a file and of the functions that `streamrl.train` has written beside it."""
    code = hmac.new(key, digestmod="sha256")
    for one in (file, *sorted((file.parent / "inputs").glob("*.py"))):
        content = one.read_bytes()
        code.update(f"{one.name}\0{len(content)}\0".encode() + content)
    return code.hexdigest()


def _key() -> bytes:
    """This user's key, made at the first use. Raises OSError: it cannot be kept, or others can read or change it."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if state.startswith("~"):
        raise FileNotFoundError(f"there is no {state}: this user has no home directory")
    file = Path(state) / "streamrl" / "signing.key"
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(secrets.token_bytes(32))
        try:
            os.link(draft, file)
        except FileExistsError:  # another process was first: all take its key
            pass
        except OSError:  # a file system without hard links
            os.replace(draft, file)
        finally:
            draft.unlink(missing_ok=True)
    with file.open("rb") as opened:
        about = os.fstat(opened.fileno())
        content = opened.read()
    if about.st_uid != os.getuid() or about.st_mode & 0o077 or len(content) < 32:
        raise PermissionError(f"{file} is no key of this user alone")
    return content
