"""python -m tests.conform [ADDRESS] [key=value ...] [-- COMMAND ...]    certify an actor that was written elsewhere

Listens at ADDRESS (tcp://127.0.0.1:5601) as the hub of a run, and examines the actor that connects: it plays leases,
acks, rejections, lost messages, new versions, damaged weights, DRAIN, STOP and restarts of the learner. The list of
what passed and what failed, with reasons, is printed at the end; requirements.py says what each name means.

  COMMAND      starts the actor, up to four times; without it you are asked to start it by hand, three times
  --patience S seconds that the actor may take for a step (20)
  key=value    settings of the run that the hub seems to serve, for an actor with a task or model of its own:
               env.path=task.py, policy.model_path=DIR, hub.keys=DIR. Default is the quickstart with a tiny model.

Exit status: 0 if nothing failed, else 1.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.hub.context.settings import HubSettings
from learner.hub_client.settings import hub_settings
from streamrl.config.addresses import is_address
from streamrl.config.load import load_config
from streamrl.config.schema import Config
from streamrl.errors import ConfigError, StreamrlError
from streamrl.messages.printable import start_log
from streamrl.stream.records import RunStarted
from tests.conform.actor_process import ByHand, Command
from tests.conform.exam import Examination
from tests.conform.hub import examination_settings
from tests.conform.weights import Model

ADDRESS = "tcp://127.0.0.1:5601"
RUN = (
    "experiment=quickstart", "run.name=conform", "rollout.num_prompts_per_step=2", "rollout.num_responses_per_prompt=2",
    "staleness.eta=500", "staleness.num_lookahead_groups=1000", "trainer.num_steps=100000", "hub.dead_after_s=600",
    "publish.transports=[zmq]", "publish.delta_max_ratio=0", "policy.tiny.num_warm_start_steps=0", "eval.pin_s=60",
    "samples.num_per_step=0", "launch.num_actors=0",
)
"""So wide a lead that the examiner alone decides when work is granted, and weights by pull alone."""


@dataclass(frozen=True)
class Words:
    address: str
    settings: list[str]
    command: list[str]
    patience_s: float


def parse(words: Sequence[str]) -> Words:
    """Raises ConfigError for a word that is neither."""
    before = list(words)
    command: list[str] = []
    if "--" in before:
        at = before.index("--")
        before, command = before[:at], before[at + 1 :]
    patience_s = 20.0
    if "--patience" in before:
        at = before.index("--patience")
        try:
            patience_s = float(before[at + 1])
        except (IndexError, ValueError):
            raise ConfigError("--patience needs a number of seconds, as in --patience 60") from None
        del before[at : at + 2]
    addresses = [word for word in before if "=" not in word]
    wrong = [word for word in addresses if not is_address(word)]
    if wrong or len(addresses) > 1:
        raise ConfigError(f"give at most one address, tcp://HOST:PORT; got {' '.join(addresses)}\n\n{__doc__}")
    return Words((addresses or [ADDRESS])[0], [word for word in before if "=" in word], command, patience_s)


def settings_of(config: Config, run_dir: Path, model: Model, vocab_size: int) -> HubSettings:
    """What the hub of the examination works with."""
    return examination_settings(hub_settings(
        config, started=RunStarted("conform", 1, 1, 0, "{}", {}), run_dir=run_dir, lineage=(), dp_ranks=(0,),
        bind=config.hub.bind, rank_endpoint=f"inproc://{run_dir.name}", shm_dir=run_dir / "shm",
        vocab_size=vocab_size, restore_path=None,
    ), model)


def examine(words: Words, notify: Callable[[str], None]) -> bool:
    """Run the examination and print what it found; whether the actor passed."""
    from envs.registry import task_of
    from learner.model.config_file import policy_vocab_size
    from learner.model.paths import model_directory
    from learner.ranks.mesh import Ranks

    config = load_config([*RUN, f"hub.bind={words.address}", *words.settings])
    model_dir = model_directory(
        config.policy, task_of(config), Ranks(), seed=config.run.seed,
        max_positions=config.learner.max_tokens_per_device,
    )
    model = Model.read(model_dir)
    with tempfile.TemporaryDirectory(prefix="streamrl-conform-") as run_dir:
        settings = settings_of(config, Path(run_dir), model, policy_vocab_size(model_dir))
        actor = Command(words.command) if words.command else ByHand(words.address, notify)
        examination = Examination(settings, model, actor, patience_s=words.patience_s, notify=notify)
        try:
            findings = examination.run()
        finally:
            examination.close()
    print("\n".join(findings.lines()))
    print("The actor conforms to the protocol." if findings.passed else "The actor does not conform to the protocol.")
    return findings.passed


def main() -> int:
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words[: words.index("--")] if "--" in words else words):
        print(__doc__)
        return 0
    start_log("conform", level=os.environ.get("STREAMRL_LOG", "ERROR").upper())
    try:
        return 0 if examine(parse(words), lambda text: print(text, flush=True)) else 1
    except StreamrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
