"""The folders of the models that settings name: those of the model hub (`owner/name`), taken from its cache on this
machine or fetched once; versions of runs; and a model with another tokenizer than its own."""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from envs.data.hub import hub_answers
from learner.model.config_file import policy_vocab_size
from streamrl.config.schema import PolicyConfig
from streamrl.errors import ConfigError, RunNotFoundError, in_one_line
from streamrl.named_code import allow_words
from streamrl.processes import for_all
from streamrl.run_dirs import find_run_dir
from streamrl.stream.rebuilt import NAMED, named_version, rebuilt
from streamrl.weights.assets import TEMPLATES
from streamrl.weights.model_folder import check_vocabulary

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""What a checkpoint of ours may hold; a repository often has the weights a second time in other formats."""
PICKLED = "pytorch_model*.bin"
"""Weights of an older repository that has no others."""
TOKENIZER_FILES = (
    "added_tokens.json", f"{TEMPLATES}/*.jinja", "chat_template.*", "merges.txt", "special_tokens_map.json",
    "sentencepiece.bpe.model", "spiece.model", "tekken.json", "tiktoken.model", "tokenizer*", "vocab.*",
)


def find_models(
    sections: Mapping[str, Any], notify: Callable[[str], None], *, allow: Iterable[str] = ()
) -> None:
    """Replace names of models of the hub, and versions of runs (RUN@N), by folders.

    Args:
        sections: that name a model, by the setting in which each does.
        allow: names of code that the run of a RUN@N may use.
    Raises:
        ConfigError: with the command that fetches one.
    """
    for setting, section in sections.items():
        key = setting.rpartition(".")[2]
        path = getattr(section, key)
        if path is not None and (named := _named(path, setting)) is not None:
            setattr(section, key, str(rebuilt(*named, allow_words(allow)).resolve()))
        elif path is not None and is_hub_name(path):
            setattr(section, key, _folder(path, setting, notify))
    if (policy := sections.get("policy.model_path")) is not None and policy.tokenizer_path is not None:
        policy.model_path = str(_with_tokenizer(Path(policy.model_path), policy))


def _with_tokenizer(model: Path, policy: PolicyConfig) -> Path:
    """A folder of links to the model's files and to those of `policy.tokenizer_path`; the model's where they are its.

    Raises ConfigError: no tokenizer there, or one with tokens that the model has no row for.
    """
    from transformers import AutoTokenizer

    other, said = Path(str(policy.tokenizer_path)), f"policy.tokenizer_path={policy.tokenizer_path}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(other, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any library that a tokenizer needs
        raise ConfigError(f"{said} holds no tokenizer, give a folder with one: {in_one_line(error)}") from error
    check_vocabulary(tokenizer, policy_vocab_size(model), said=said)
    theirs, mine = _tokenizer_files(other), _tokenizer_files(model)
    contents = {name: path.read_bytes() for name, path in theirs.items()}
    if contents == {name: path.read_bytes() for name, path in mine.items()}:
        return model
    known = hashlib.sha256(repr((str(model.resolve()), sorted(contents.items()))).encode()).hexdigest()[:12]
    folder = Path(policy.tiny.cache_dir).resolve() / f"{model.name}-tokenizer-{known}"
    if not folder.is_dir():
        draft = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
        kept = {one.name: one for one in model.iterdir() if one.is_file() and one.name not in mine}
        for name, path in (kept | theirs).items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).symlink_to(path.resolve())
        try:
            draft.rename(folder)
        except OSError:  # another rank was first
            shutil.rmtree(draft)
    return folder


def _tokenizer_files(folder: Path) -> dict[str, Path]:
    found = (path for pattern in TOKENIZER_FILES for path in sorted(folder.glob(pattern)) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in found}


def _named(path: str, setting: str) -> tuple[Path, int] | None:
    """The run and version of RUN@N, for a run's name without runs/ too. Raises ConfigError: there is no such run."""
    if (named := named_version(path)) is not None or Path(path).exists() or not NAMED.fullmatch(path) or "://" in path:
        return named
    run, _, version = path.rpartition("@")
    try:
        return named_version(f"{find_run_dir(run)}@{version}")
    except RunNotFoundError as error:
        raise ConfigError(f"{setting}={path}: {error}") from error


def is_hub_name(name: str) -> bool:
    """Whether this is `owner/name` and no folder here; what begins with models/ or runs/ is meant to be one."""
    ours = (".", "/", "~", "models/", "runs/")
    return name.count("/") == 1 and "@" not in name and not name.startswith(ours) and not Path(name).exists()


def _folder(name: str, setting: str, notify: Callable[[str], None]) -> str:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    by_hand = f"hf download {name} --local-dir models/{Path(name).name}"
    try:
        cached = Path(snapshot_download(name, allow_patterns=list(FILES), local_files_only=True))
        if _is_whole(cached):
            return str(cached)
    except HFValidationError as error:
        raise ConfigError(
            f"{setting}={name} is no folder here (looked in {Path.cwd()}) and cannot be a name of the model hub: give "
            "either"
        ) from error
    except LocalEntryNotFoundError:
        pass
    if not hub_answers():
        raise ConfigError(
            f"{setting}={name} is no folder here and not in the cache of the model hub, which cannot be reached from "
            f"here: run {by_hand} on a machine that can, then give that folder."
        )
    notify(f"fetching {name} from {constants.ENDPOINT}")
    try:
        with for_all():
            found = Path(snapshot_download(name, allow_patterns=list(FILES)))
            if not _is_whole(found):
                found = Path(snapshot_download(name, allow_patterns=[*FILES, PICKLED]))
            return str(found)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{setting}={name} could not be fetched: {reason} Check the name, or give a local folder: {by_hand}."
        ) from error


def _is_whole(folder: Path) -> bool:
    """Tell whether a folder holds a configuration and weights."""
    return (folder / "config.json").exists() and any(any(folder.glob(one)) for one in ("*.safetensors", PICKLED))
