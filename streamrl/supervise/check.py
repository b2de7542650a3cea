"""The check of a run's settings before its directory is made, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence

from streamrl.config.addresses import key_of
from streamrl.config.devices import Choice
from streamrl.config.schema import Config
from streamrl.errors import ConfigError, StreamrlError
from streamrl.parent_watch import NOTICE, program
from streamrl.processes import Child
from streamrl.supervise.actors import EXIT_CONFIG
from streamrl.supervise.caller import Caller


def check_engine(config: Config) -> None:
    """Raise ConfigError if the actors started here lack their engine's package."""
    if config.launch.num_actors and config.actors.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "actors.engine=vllm: vLLM is not installed here. Run `make vllm` (docs/vllm.md), take "
            "actors.engine=native, or launch.num_actors=0 and start the actors on a machine that has it."
        )


def check_settings(config: Config, overrides: Sequence[str], caller: Caller) -> list[Choice]:
    """Raise ConfigError for what would end the learner or the actors in their first seconds; no directory is made yet.

    Returns what is chosen for the learner's GPU beyond what the settings alone decide.

    The learner's preflight runs in a process of its own: neither torch nor the user's task belongs into the supervisor.
    """
    check_engine(config)
    if config.launch.num_actors:  # they have this environment
        key_of("actors.endpoint.admin_key_env", config.actors.endpoint.admin_key_env)
    caller.say("checking the settings")
    told: list[str] = []

    def pass_on(line: str) -> None:
        told.append(line)
        if line.startswith(NOTICE):
            caller.say(line.removeprefix(NOTICE), end="")

    check = Child([*program("learner"), "--check", *overrides], answers=True, on_error=pass_on)
    assert check.process.stdout is not None
    try:
        answer = check.process.stdout.read().decode(errors="replace").strip()
        code = check.process.wait()
        check.errors(wait_s=1.0)  # all that it says has been passed on
    finally:
        check.kill()
    if code == EXIT_CONFIG and answer:
        raise ConfigError(answer)
    if code != 0:
        raise StreamrlError(f"the check of the settings ended with status {code}:\n{''.join(told).strip()}")
    return [Choice(**one) for one in json.loads(answer or "[]")]
