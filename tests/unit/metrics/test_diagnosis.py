"""The one line on what limits a run: every answer, its borders, and where its shares come from."""

from dataclasses import replace

import pytest

from streamrl.metrics.diagnosis import Bottleneck, Shares, diagnose, diagnosis_of, learner_idle, shares_of
from streamrl.metrics.run_record import RunRecord
from streamrl.metrics.summary import summarize
from streamrl.report import compare, headline
from streamrl.report.live.panel import NUM_RECENT_STEPS, ViewState

BUSY_ACTORS = Shares(
    learner_idle=0.38, starved=0.0, paused=0.01, environment=0.1, step_p95_s=0.02, num_env_steps=50.0, num_actors=2.6
)


@pytest.mark.parametrize(
    ("changes", "bottleneck", "text"),
    [
        ({}, "generation", "generation-bound: learner idle 38%, about 1.6 more actors would fill it"),
        ({"num_actors": 100.0}, "generation", "generation-bound: learner idle 38%, about 61 more actors would fill it"),
        ({"learner_idle": 0.04, "starved": 0.7}, "learner",
         "learner-bound: learner idle 4%, actors without work 70%"),
        ({"learner_idle": 0.0}, "learner", "learner-bound: learner idle 0%, actors without work 0%"),
        ({"environment": 0.71, "step_p95_s": 2.13}, "environment",
         "environment-bound (step p95 2.1s): learner idle 38%"),
        ({"paused": 0.6}, "install", "install-bound: learner idle 38%, engines paused for installs 60%"),
        ({"paused": 0.45, "starved": 0.2, "environment": 0.9}, "install",
         "install-bound: learner idle 38%, engines paused for installs 56%"),
        ({"environment": 0.71, "step_p95_s": 54e-6, "num_env_steps": 1900.0}, "environment",
         "environment-bound (step p95 54µs): learner idle 38%"),
        ({"environment": 0.71, "step_p95_s": 54e-6}, "generation",
         "generation-bound: learner idle 38%, about 1.6 more actors would fill it"),
        ({"learner_idle": 0.5, "starved": 0.55}, "lead",
         "lead-bound (learner idle 50%, actors 55%): higher staleness.eta saves ≤ 50%"),
        ({"learner_idle": 0.17, "starved": 0.53}, "lead",
         "lead-bound (learner idle 17%, actors 53%): higher staleness.eta saves ≤ 17%"),
        ({"learner_idle": 0.99, "num_actors": 0.0, "starved": 1.0}, "lead",
         "lead-bound (learner idle 99%, actors 100%): higher staleness.eta saves ≤ 99%"),
        ({"learner_idle": 0.11, "starved": 0.08}, "lead", "lead-bound: learner idle 11%, actors without work 8%"),
    ],
)
def test_each_bottleneck_in_words(changes, bottleneck, text):
    found = diagnose(replace(BUSY_ACTORS, **changes))

    assert (found.bottleneck, found.text) == (Bottleneck(bottleneck), text)
    assert len(text) <= 76


@pytest.mark.parametrize("idle", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("starved", [0.0, 0.1])
def test_with_the_actors_that_it_asks_for_neither_side_would_wait(idle, starved):
    shares = replace(BUSY_ACTORS, learner_idle=idle, starved=starved)
    more = diagnose(shares).more_actors
    # What both sides could handle if they never waited, in groups per second, when they handle 1 now.
    learner, one_actor = 1 / (1 - idle), 1 / (1 - starved) / shares.num_actors

    assert (shares.num_actors + more) * one_actor == pytest.approx(learner)


def test_more_actors_are_no_advice_where_they_would_not_help():
    assert diagnose(replace(BUSY_ACTORS, learner_idle=0.01)).more_actors is None
    assert diagnose(replace(BUSY_ACTORS, learner_idle=0.5, starved=0.5)).more_actors is None
    assert diagnose(replace(BUSY_ACTORS, paused=0.9)).more_actors is None


def row(step: int, wait_s: float, *, actor_s: float = 0.0, **hub: float) -> dict[str, float]:
    names = ("num_members_accepted", "actor_starved_s", "actor_paused_s", "episode_generation_s",
             "episode_environment_s")
    sums = {f"hub/{name}": hub.get(name, 0.0) for name in names}
    return {"step": step, "time/step_s": 1.0, "time/wait_s": wait_s, "time/checkpoint_s": 0.25, "hub/actor_s": actor_s,
            "hub/num_actors": 3.0, "hub/env_step_p95_s": 0.5, **sums}


def test_shares_are_of_the_time_after_the_first_steps():
    rows = [
        row(1, 0.99, actor_s=50.0, actor_starved_s=50.0, episode_environment_s=300.0),
        row(2, 0.99, actor_s=90.0, actor_starved_s=90.0, episode_environment_s=900.0),
        row(3, 0.99, actor_s=100.0, actor_starved_s=100.0, episode_environment_s=999.0),
        row(4, 0.5, actor_s=102.0, actor_starved_s=100.5, episode_generation_s=6.0, episode_environment_s=1000.0),
        row(5, 0.25, actor_s=104.0, actor_starved_s=101.0, actor_paused_s=0.4, episode_generation_s=6.0,
            episode_environment_s=1001.0, num_members_accepted=9.0),
        {"step": 5, "run/wall_s": 9.0},  # the last row of a run has no step
    ]

    assert shares_of(rows) == Shares(
        learner_idle=0.75 / 2.5, starved=0.25, paused=0.1, environment=0.25, step_p95_s=0.5, num_env_steps=3.0,
        num_actors=3.0,
    )
    recent = shares_of(rows, 1)
    assert recent is not None and (recent.learner_idle, recent.environment) == (0.2, 1.0)
    assert shares_of(rows, 50) == shares_of(rows)


def test_a_whole_run_of_few_steps_is_too_short_to_tell():
    rows = [row(step, 0.5, actor_s=float(step)) for step in range(1, 31)]
    short, enough = diagnosis_of(rows[:-1]), diagnosis_of(rows)

    assert short is not None and (short.bottleneck, short.text) == (None, "too short to tell (29 of at least 30 steps)")
    assert enough is not None and enough.bottleneck is not None
    assert diagnosis_of(rows[:10], 4) == diagnosis_of(rows, 4)  # while it runs: of its newest steps


def test_the_share_that_the_learner_waited_is_one_number_wherever_it_stands(tmp_path):
    """Terminal, report, comparison, live view and diagnosis divide the same seconds by the same seconds."""
    rows = [row(step, 0.9 if step <= 3 else 0.5, actor_s=float(step), actor_starved_s=0.9 * step)
            for step in range(1, 41)]
    told = "40%"  # 0.5 of 1.25 s
    summary = summarize(rows, run_id="r", max_lag_bound=1, device="cpu", dtype="float32", seed=0, wall_s=99.0)
    record = RunRecord(rows, name="r", summary=summary)
    view = ViewState(rows=rows)

    assert dict(summary.headline())["learner waited"] == f"{told} of its time"
    assert f"learner idle {told}" in summary.diagnosis
    assert f"<dt>learner waited</dt><dd><b>{told}</b>" in headline.tiles(record)
    assert told in compare._row(record, "r")
    assert view.wait_share == learner_idle(rows, NUM_RECENT_STEPS) == learner_idle(rows) == pytest.approx(0.4)


def test_a_hub_that_was_restarted_adds_to_what_it_had_counted():
    rows = [*(row(step, 0.5, actor_s=50.0) for step in (1, 2, 3)), row(4, 0.5, actor_s=52.0),
            row(5, 0.5, actor_s=1.0, actor_starved_s=0.5)]
    shares = shares_of(rows)

    assert shares is not None and shares.starved == pytest.approx(0.5 / 3.0)


def test_without_two_steps_or_without_heartbeats_there_is_no_diagnosis():
    assert diagnosis_of([]) is None
    assert diagnosis_of([row(1, 0.5, actor_s=5.0)], 20) is None
    assert diagnosis_of([row(step, 0.5, actor_s=5.0) for step in range(40)]) is None
