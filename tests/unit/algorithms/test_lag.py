"""Lag of tokens and trajectories, capacity, and the lag bound by simulation."""

from __future__ import annotations

import heapq
import random

import pytest
import torch

import streamrl.algorithms as alg

from .rows import action_lists, random_rows


@pytest.mark.parametrize("seed", range(5))
def test_lags_are_version_differences_over_action_tokens(seed):
    rows = random_rows(seed)

    lags, summary = alg.token_lags(rows.versions, 20, rows.mask), alg.lag_summary(rows.versions, 20, rows.mask)

    for i, (versions,) in enumerate(action_lists(rows, "versions")):
        expected = [20 - v for v in versions]
        assert lags[i][rows.mask[i]].tolist() == expected
        head, tail = max(expected, default=0), min(expected, default=0)
        assert (int(summary.head[i]), int(summary.tail[i]), int(summary.span[i])) == (head, tail, head - tail)
        assert float(summary.mean[i]) == pytest.approx(sum(expected) / max(1, len(expected)))
    assert lags.dtype == summary.head.dtype == torch.int64


def test_admission_at_the_cut_is_strict_about_age_and_about_the_future():
    versions = torch.tensor([[5, 9], [6, 9], [10, 11], [10, 10], [-3, 9]])
    mask = torch.ones(5, 2, dtype=torch.bool)
    mask[4, 0] = False  # an old token that is not trained on does not count

    summary = alg.lag_summary(versions, 10, mask)

    assert alg.admissible(summary, max_lag=4).tolist() == [False, True, False, True, True]


def test_token_level_admission_masks_the_prefix():
    versions = torch.tensor([[3, 5, 6, 11]])
    mask = torch.ones(1, 4, dtype=torch.bool)

    keep = alg.lag_keep(alg.token_lags(versions, 10, mask), mask, max_lag=4)

    assert keep.tolist() == [[False, False, True, False]]


def test_old_tokens_weigh_less_step_by_step_and_young_ones_what_they_did():
    lags = torch.tensor([[6, 5, 4, 2, 0]])
    mask = torch.tensor([[True, True, True, True, False]])

    assert alg.lag_weights(lags, mask, max_lag=4, decay=0.5).tolist() == [[0.25, 0.5, 1.0, 1.0, 0.0]]


def test_a_group_is_split_into_runs_of_neighboring_lags_and_others_stay_whole():
    group_ids = torch.tensor([7, 7, 7, 7, 3, 3])
    head_lags = torch.tensor([5, 0, 1, 4, 2, 3])

    split = alg.split_by_lag(group_ids, head_lags, budget=1).tolist()

    assert split[1] == split[2] != split[3] == split[0] and split[4] == split[5]
    assert len(set(split)) == 3
    spread = alg.group_spread(head_lags, torch.tensor(split))
    assert spread.tolist() == [1, 1, 1, 1, 1, 1]
    whole = alg.split_by_lag(group_ids, head_lags, budget=5).tolist()
    assert len(set(whole)) == 2


def test_group_spread():
    spread = alg.group_spread(torch.tensor([4, 1, 7, 2, 2]), torch.tensor([0, 0, 1, 0, 1]))

    assert spread.tolist() == [3, 3, 5, 3, 5]
    assert spread.dtype == torch.int64


def test_capacity_never_goes_below_zero_and_respects_concurrency():
    assert alg.capacity(version=0, eta=0, batch_size=8, accepted=0, running=0) == 8
    assert alg.capacity(version=0, eta=0, batch_size=8, accepted=8, running=5) == 0
    assert alg.capacity(version=0, eta=9, batch_size=8, accepted=0, running=3, max_concurrent=4) == 1
    assert alg.capacity(version=0, eta=9, batch_size=8, accepted=0, running=9, max_concurrent=4) == 0


def test_default_max_lag_and_restart():
    assert alg.default_max_lag(4, 8, 8) == 5
    assert alg.default_max_lag(4, 9, 8) == 6
    assert alg.default_max_lag(0, 0, 8) == 0
    assert alg.accepted_after_restart(7, 8) == 56
    assert alg.accepted_after_restart(7, 8, 3) == 59


def test_little_law_forecast():
    forecast = alg.forecast_lag(
        groups_per_s=2.0, batch_size=8, num_in_flight=24, num_queued=8, mean_tokens=100, mean_square_tokens=20_000,
        s_per_token=0.05,
    )  # fmt: skip

    assert forecast.head == 4.0
    assert forecast.token_mean == 2.5
    # Half the time since the token was made: E[L^2] / (2 E[L]) tokens at 0.05 s, and 4 s in the queue, at 0.25 steps/s.
    assert forecast.token_weighted == pytest.approx(0.25 * (0.05 * 100 + 4.0))


def test_forecast_of_token_lag_matches_sampled_lengths():
    # One group per second, B = 4. A token is ready s_per_token * (tokens still to come) seconds before its group.
    generator = random.Random(0)
    lengths = [generator.choice([10, 50, 400]) for _ in range(20_000)]
    waits = [0.01 * (length - 1) / 2 for length in lengths]
    weighted = sum(w * length for w, length in zip(waits, lengths, strict=True)) / sum(lengths)
    mean = sum(lengths) / len(lengths)
    square = sum(length**2 for length in lengths) / len(lengths)

    forecast = alg.forecast_lag(
        groups_per_s=1.0, batch_size=4, num_in_flight=2, num_queued=0, mean_tokens=mean, mean_square_tokens=square,
        s_per_token=0.01,
    )  # fmt: skip

    assert forecast.token_weighted == pytest.approx(weighted / 4, rel=0.02)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: alg.capacity(version=0, eta=0, batch_size=0, accepted=0, running=0), "batch_size=0"),
        (lambda: alg.capacity(version=0, eta=-1, batch_size=1, accepted=0, running=0), "eta=-1"),
        (lambda: alg.capacity(version=0, eta=0, batch_size=1, accepted=-1, running=0), "accepted=-1"),
        (lambda: alg.accepted_after_restart(-1, 8), "version=-1"),
        (lambda: alg.default_max_lag(0, -1, 8), "window=-1"),
        (lambda: alg.lag_keep(torch.zeros(1, 1), torch.ones(1, 1).bool(), max_lag=-1), "max_lag=-1"),
        (lambda: alg.lag_weights(torch.zeros(1, 1), torch.ones(1, 1).bool(), max_lag=1, decay=2.0), "decay=2.0"),
        (lambda: alg.split_by_lag(torch.zeros(2), torch.zeros(2), budget=-1), "budget=-1"),
        (lambda: alg.group_spread(torch.zeros(2), torch.zeros(3)), r"\[3\].*\[2\]"),
        (
            lambda: alg.forecast_lag(
                groups_per_s=0, batch_size=1, num_in_flight=0, num_queued=0, mean_tokens=1, mean_square_tokens=1,
                s_per_token=1,
            ),
            "groups_per_s=0",
        ),
    ],
)  # fmt: skip
def test_wrong_shapes_and_knobs_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# 24. The bound eta + ceil(W / B), by a discrete-event simulation that decides every grant with `capacity`.


class Group:
    def __init__(self, version):
        self.version, self.done_at, self.consumed = version, None, False


class Run:
    """A learner, five actors with late installs, 20% filtered groups. A group's rank is its place in `order`."""

    def __init__(
        self, seed, *, eta, batch, window, learners_version=False, completion_order=False, keep_filtered=False
    ):
        self.random = random.Random(seed)
        self.eta, self.batch, self.window = eta, batch, window
        self.learners_version, self.completion_order = learners_version, completion_order
        self.keep_filtered = keep_filtered
        self.version, self.installed = 0, [0] * 5
        self.order = []  # every group ever leased and not removed, consumed ones included
        self.accepted = self.running = self.worst = 0
        self.events, self.number = [], 0

    def at(self, time, kind, *payload):
        heapq.heappush(self.events, (time, self.number, kind, payload))
        self.number += 1

    def ask(self, now, actor):
        version = self.version if self.learners_version else self.installed[actor]
        free = alg.capacity(
            version=version, eta=self.eta, batch_size=self.batch, accepted=self.accepted, running=self.running
        )
        if free == 0:
            self.at(now + 0.3, "ask", actor)
            return
        group = Group(self.installed[actor])
        self.order.append(group)
        self.running += 1
        self.at(now + self.random.expovariate(1.0) + 0.05, "finish", actor, group)

    def finish(self, now, actor, group):
        self.running -= 1
        if self.random.random() < 0.2:
            self.order.remove(group)
            self.accepted += self.keep_filtered  # the fault: a filtered group that stays in the count
        else:
            group.done_at = now
            self.accepted += 1
        self.ask(now, actor)
        self.train(now)

    def install(self, now, actor, version):
        self.installed[actor] = max(self.installed[actor], version)  # installs may overtake each other

    def cut(self):
        taken = []
        while len(taken) < self.batch:
            waiting = [k for k, group in enumerate(self.order) if not group.consumed and group not in taken]
            ready = [k for k in waiting if self.order[k].done_at is not None]
            if self.completion_order:
                ready.sort(key=lambda k: self.order[k].done_at)
            else:
                ready = [k for k in ready if k - waiting[0] <= self.window]
            if not ready:
                return []
            taken.append(self.order[ready[0]])
        return taken

    def train(self, now):
        for group in self.cut():
            group.consumed = True
            self.worst = max(self.worst, self.version - group.version)
            if sum(g.consumed for g in self.order) == (self.version + 1) * self.batch:
                self.version += 1
                for actor in range(len(self.installed)):
                    self.at(now + self.random.expovariate(0.7), "install", actor, self.version)

    def play(self, num_steps, until=2_000.0):
        for actor in range(len(self.installed)):
            self.at(0.0, "ask", actor)
        while self.version < num_steps and self.events[0][0] < until:
            now, _, kind, payload = heapq.heappop(self.events)
            getattr(self, kind)(now, *payload)
        return self


SETTINGS = [(0, 4, 0), (0, 4, 4), (1, 3, 3), (2, 4, 4), (3, 2, 5), (1, 1, 1)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("eta, batch, window", SETTINGS)
def test_24_no_consumed_group_is_older_than_eta_plus_the_window(eta, batch, window, seed):
    run = Run(seed, eta=eta, batch=batch, window=window).play(60)

    assert run.version == 60  # no deadlock, at eta 0 as well
    bound = 0 if eta == 0 else alg.default_max_lag(eta, window, batch)
    assert run.worst <= bound


def test_24_the_bound_is_reached():
    assert max(Run(seed, eta=2, batch=4, window=4).play(80).worst for seed in range(12)) == 3


@pytest.mark.parametrize("fault", ["learners_version", "completion_order"])
def test_24_the_negative_controls_break_the_bound(fault):
    worst = max(Run(seed, eta=1, batch=3, window=3, **{fault: True}).play(80).worst for seed in range(12))

    assert worst > alg.default_max_lag(1, 3, 3)


def test_24_filtered_groups_left_in_the_count_stop_dispatch():
    leaking = Run(0, eta=1, batch=3, window=3, keep_filtered=True).play(60, until=300.0)

    assert leaking.version < 60
    assert Run(0, eta=1, batch=3, window=3).play(60, until=300.0).version == 60


def test_24_a_restart_that_counts_from_zero_admits_a_burst():
    version, batch, eta = 50, 8, 2

    honest = alg.capacity(
        version=version, eta=eta, batch_size=batch, accepted=alg.accepted_after_restart(version, batch), running=0
    )
    burst = alg.capacity(version=version, eta=eta, batch_size=batch, accepted=0, running=0)

    assert honest == (eta + 1) * batch
    assert burst - honest == version * batch
