"""What-if: the settings of each fork, where its evidence ends, and what is shown of it."""

import pytest

from learner.replay.what_if import OWN, arms
from streamrl.config.load import load_config, to_yaml
from streamrl.errors import ConfigError
from streamrl.report.what_if import PATIENCE, Fork, Point, text_table, what_if_page


@pytest.fixture
def run_dir(tmp_path):
    config = load_config(["experiment=quickstart", "algorithm=grpo", "policy.optimizer.lr=0.001"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    return tmp_path


def test_a_fork_has_another_algorithm_and_else_the_runs_settings(run_dir):
    found = arms(run_dir, ["algorithm=vespo,dr_grpo", "policy.optimizer.max_grad_norm=0.5"])
    own, vespo, dr_grpo = found.values()
    assert list(found)[0] == OWN and own.kl.mode == "k3_is"
    assert (vespo.loss.surrogate, vespo.kl.mode, vespo.advantage.scale) == ("vespo", "k3_is", "std")
    assert (dr_grpo.advantage.scale, dr_grpo.kl.mode) == ("none", "off")
    for fork in (vespo, dr_grpo):
        assert (fork.policy.optimizer.lr, fork.policy.optimizer.max_grad_norm) == (0.001, 0.5)
        assert fork.staleness == own.staleness and fork.filter == own.filter


@pytest.mark.parametrize(("words", "message"), [
    ([], "no setting is changed"), (["algorithm=vespa"], "algorithm=vespa is unknown: Did you mean vespo"),
    (["filter.zero_std=false"], "a stream unlike the recorded one"),
    (["learner.num_epochs=2"], "a stream unlike the recorded one"),
])
def test_what_no_fork_can_have_is_refused(run_dir, words, message):
    with pytest.raises(ConfigError, match=message):
        arms(run_dir, words)


def fork(*ess: float | None) -> Fork:
    return Fork("vespo", [Point(at, 0.5, 0.1, 1.0, 0.0, 1.0, one) for at, one in enumerate(ess)], 1, len(ess))


@pytest.mark.parametrize(("ess", "ends"), [
    ([0.2] * PATIENCE, True), ([0.2] * (PATIENCE - 1), False), ([0.2, 0.2, 0.9, 0.2, 0.2], False),
    ([0.9, *[0.0] * PATIENCE], True), ([None] * PATIENCE, False),
])
def test_the_evidence_ends_after_several_batches_of_low_ess(ess, ends):
    assert fork(*ess).evidence_ends == ends


def test_table_and_page_tell_where_a_fork_stopped():
    own, other = fork(1.0, 0.9, 0.9), fork(1.0, 0.1)
    own.name, other.ended = OWN, "stops at version 2"
    text = text_table([own, other])
    assert "vespo: 1 of 2 versions bit-equal to the run's; stops at version 2" in text
    html = what_if_page("a-run", 0, [own, other])
    assert "vespo: its evidence ends" in html and "evidence ends" in html and "a-run" in html
