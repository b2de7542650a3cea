"""`streamrl push RUN[@N] OWNER/NAME`: a run's model on the Hugging Face hub, with a card and a tag of its version."""

from __future__ import annotations

import argparse
from pathlib import Path

import httpx

from streamrl.config.load import run_settings
from streamrl.errors import ConfigError, ControlError, in_one_line
from streamrl.messages.printable import printable
from streamrl.metrics.files import read_object
from streamrl.run_dirs import find_run_dir
from streamrl.stream.rebuilt import NAMED, best_version, rebuilt
from streamrl.version import __version__

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def push(words: list[str]) -> int:
    """Upload a model in one commit. Raises ConfigError, ControlError, RunNotFoundError."""
    parser = argparse.ArgumentParser(prog="streamrl push", description=__doc__)
    parser.add_argument("run", metavar="RUN[@N]", help="a run with an exported model, or RUN@137, RUN@best")
    parser.add_argument("repository", metavar="OWNER/NAME", help="on the hub; it is made if it is not there")
    parser.add_argument("--public", action="store_true", help="a repository that is made is for everybody")
    given = parser.parse_args(words)
    run_dir, version, folder = model_of(given.run)
    url = uploaded(folder, given.repository, card_of(run_dir, version), f"{run_dir.resolve().name}-{version}",
                   private=not given.public)
    print(printable(f"version {version} of {run_dir} is at {url}"))
    return 0


def model_of(word: str) -> tuple[Path, int, Path]:
    """(run directory, version, folder of its model) of a RUN, RUN@N or RUN@best; a version may be rebuilt first."""
    if (named := NAMED.fullmatch(word)) is not None and not Path(word).exists():
        run_dir = find_run_dir(named[1])
        version = int(named[2]) if named[2] else best_version(run_dir, named[3] or "")
        return run_dir, version, rebuilt(run_dir, version)
    run_dir = find_run_dir(word)
    if not (run_dir / "model" / "config.json").exists():
        raise ConfigError(
            f"{run_dir} has no exported model (checkpoint.export_hf=true writes one at the end): name a version, "
            f"or take {run_dir}@best"
        )
    summary = read_object(run_dir / "summary.json")
    status = read_object(run_dir / "status.json")
    if status.get("state", "finished") != "finished" or summary.get("stopped") or summary.get("failed"):
        raise ConfigError(
            f"{run_dir}/model is of an earlier end of the run, which went on and has not finished since: name a "
            f"version, or take {run_dir}@best"
        )
    return run_dir, int(status.get("version", summary.get("steps", 0))), run_dir / "model"


def card_of(run_dir: Path, version: int) -> str:
    """The model card: what it was trained from, with which algorithm, for how long and with which score."""
    config, summary = run_settings(run_dir), read_object(run_dir / "summary.json")
    base = config.policy.model_path or ""
    known = f"base_model: {base}\n" if base.count("/") == 1 and not Path(base).exists() and base[0].isalnum() else ""
    scores = {"evaluation": summary.get("eval_score_last"), "held-out loss": summary.get("held_out_loss_last")}
    scores |= {f"evaluation on {name}": last for name, _, last in summary.get("eval_sets", ())}
    ended = "".join(f", last {what} {score:.4g}" for what, score in scores.items() if isinstance(score, int | float))
    trained = summary.get("kind") or f"advantage {config.advantage.estimator}, loss {config.loss.surrogate}"
    return (
        f"---\nlibrary_name: transformers\ntags: [streamrl]\n{known}---\n# {run_dir.resolve().name}\n\n"
        f"Version {version} of a run with streamrl {__version__}: {trained}; {summary.get('steps', 'unknown')} steps "
        f"in all{ended}.\n"
    )


def uploaded(folder: Path, repository: str, card: str, tag: str, *, private: bool) -> str:
    """The address of the repository, which now has these files and the card. Raises ConfigError, ControlError."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    files = sorted(path for pattern in FILES for path in folder.glob(pattern))
    adds = [CommitOperationAdd(path.name, str(path)) for path in files]
    api = HfApi(library_name="streamrl", library_version=__version__)
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.create_commit(
            repository, [*adds, CommitOperationAdd("README.md", card.encode())], commit_message=f"streamrl {tag}"
        )
        api.create_tag(repository, tag=tag, exist_ok=True)
    except HFValidationError as error:
        raise ConfigError(f"{repository} must be OWNER/NAME, a repository: {in_one_line(error)}") from error
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise ControlError(
            f"{repository} was not written: {in_one_line(error)}. Log in with `hf auth login` or set HF_TOKEN, to a "
            "token that may write there, and leave HF_HUB_OFFLINE unset"
        ) from error
    return str(url)
