"""Environments that do not return: told while they run, and the run stops if none ever returns."""

from learner.hub.observers.counters import LAST_CHANCE_S, REPEAT_S, HungCalls
from streamrl.messages import ANSWERED_STEPS, HUNG_CALLS, SLOW_CALLS, SLOWEST_CALL_S


def stats(slow: int = 0, seconds: float = 0.0, hung: int = 0, answered: int = 0) -> dict[str, float]:
    numbers = {SLOW_CALLS: slow, SLOWEST_CALL_S: seconds, HUNG_CALLS: hung, ANSWERED_STEPS: answered}
    return {name: float(value) for name, value in numbers.items()}


def hung_calls() -> tuple[list[str], HungCalls]:
    said: list[str] = []
    return said, HungCalls(said.append, task="judge.py", limit_s=30)


def test_slow_calls_are_told_once_a_minute_with_their_number_age_and_limit():
    said, calls = hung_calls()
    calls.beat("a", stats(), 0.0)
    calls.beat("b", {}, 0.0)  # an actor of another release
    assert said == []

    calls.beat("a", stats(slow=3, seconds=11.2), 11.0)
    calls.beat("b", stats(slow=1, seconds=10.5), 11.5)
    calls.beat("a", stats(), 20.0)
    calls.beat("a", stats(slow=1, seconds=12), 40.0)
    assert said == [
        "3 calls of the environment of task judge.py still running after 11 s; the limit is env.step_timeout_s=30"
    ]

    calls.beat("a", stats(slow=1, seconds=12), 12.0 + REPEAT_S)
    assert len(said) == 2 and said[1].startswith("2 calls")


def test_a_run_in_which_no_step_returns_stops_soon_after_the_first_that_is_given_up():
    said, calls = hung_calls()
    calls.beat("a", stats(hung=4), 30.0)
    calls.beat("b", stats(hung=4), 30.0 + LAST_CHANCE_S)
    assert calls.fatal == ""

    calls.beat("a", stats(hung=4), 30.5 + LAST_CHANCE_S)

    assert calls.fatal.startswith("every call of the environment of task judge.py hangs, so the run stops: 8 timed out")
    assert said == [calls.fatal]


def test_one_step_that_returned_anywhere_keeps_the_run_going():
    said, calls = hung_calls()
    calls.beat("a", stats(answered=1), 0.0)
    calls.beat("b", stats(hung=4), 30.0)
    calls.beat("b", stats(hung=9), 90.0)

    assert (calls.fatal, said) == ("", [])


def test_an_actor_that_left_no_longer_counts():
    _, calls = hung_calls()
    calls.beat("a", stats(hung=4), 30.0)
    calls.remove("a")
    calls.beat("b", stats(), 60.0)

    assert calls.fatal == ""
