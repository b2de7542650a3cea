"""`streamrl samples`: what it prints into a pipe, and with colors for a terminal."""

import sys

import pytest

from streamrl.cli import main
from streamrl.metrics.samples import Sample, SampleFile, SampleTokens, Turn
from streamrl.report.sample_view import rendered, visible


def sample(step: int, answer: str, *, reward: float = 0.0, lag: int = 0, kind: str = "train", **changes) -> Sample:
    return Sample(**{**dict(
        kind=kind, step=step, version=max(0, step - 1 - lag), lag=lag, prompt=f"question {step}?", answer=answer,
        reward=reward, score=reward, num_tokens=len(answer), group=step, member=1, record=70 + step, actor="a0",
    ), **changes})


SAMPLES = [
    sample(0, "evaluated", reward=0.5, kind="eval", fate="eval"),
    sample(1, "good", reward=1.0, advantage=0.5),
    sample(2, "bad and Long", reward=-1.0, lag=1),
    sample(3, "fair", reward=0.25, lag=3, truncated=True, parts={"format": 1.0}),
]


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    file = SampleFile(tmp_path, max_bytes=1 << 20)
    file.append(SAMPLES)
    return tmp_path


def command(monkeypatch, capsys, *words) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["streamrl", "samples", *map(str, words)])
    try:
        code = main()
    except SystemExit as refused:  # of the parser
        code = refused.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        ([], ["fair", "bad and Long", "good", "evaluated"]),
        (["-n", "1"], ["fair"]), (["-n", "0", "--step=2"], ["bad and Long"]),
        (["--kind", "eval"], ["evaluated"]), (["--sort", "reward"], ["good", "evaluated", "fair", "bad and Long"]),
        (["--worst", "-n", "2"], ["bad and Long", "fair"]), (["--sort", "lag", "-n", "1"], ["fair"]),
        (["--sort", "length", "--worst", "-n", "1"], ["good"]), (["--search", "long"], ["bad and Long"]),
        (["--search", "question 1"], ["good"]),
    ],
)
def test_a_pipe_gets_what_was_asked_for_as_plain_text(monkeypatch, capsys, run_dir, words, answers):
    code, printed, _ = command(monkeypatch, capsys, run_dir, *words)

    lines = printed.splitlines()
    assert code == 0 and [lines[i + 1] for i, line in enumerate(lines) if line == "--- answer"] == answers
    assert "\x1b" not in printed


def test_a_terminal_or_a_pager_gets_colors(monkeypatch, capsys, run_dir):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")

    _, printed, _ = command(monkeypatch, capsys, run_dir)

    assert "\x1b[1mtrain  step 3" in printed and printed.count("--- answer") == len(SAMPLES)


def test_a_sample_shows_its_numbers():
    text = rendered(SAMPLES[3]).plain

    assert text.splitlines()[0] == (
        "train  step 3  reward 0.25  lag 3 (version 0)  4 tokens, cut short  group 3 member 1  record 73  a0"
    )
    assert "parts: format 1" in text and "--- prompt\nquestion 3?" in text
    assert "expected" not in text


def test_a_sample_shows_the_right_answer_below_the_models():
    text = rendered(sample(3, "27", expected="17\x1b[2J")).plain

    assert text.endswith("--- answer\n27\n--- expected\n17␛[2J\n")
    assert "not trained on: stale" in rendered(sample(3, "x", fate="stale")).plain


def test_turns_are_shown_one_by_one_with_their_rewards():
    turns = [Turn("assistant", "hm", 0.5), Turn("environment", "go on"), Turn("assistant", "done")]

    text = rendered(sample(1, "hm\ndone", messages=turns)).plain

    assert "--- assistant (reward 0.5)\nhm\n--- environment\ngo on\n--- assistant\ndone" in text


def test_tokens_are_colored_by_their_ratio_and_the_rest_of_the_answer_follows():
    tokens = SampleTokens([1, 2, 3, 4], ["up", "same", "down", "env"], [2.0, 1.01, 0.9, None], [0, 0, 0, -1])

    text = rendered(sample(1, "upsamedownenv and more", tokens=tokens))

    styles = {text.plain[span.start : span.end]: span.style for span in text.spans if span.style}
    assert (styles["up"], styles["down"]) == ("bold green", "red") and not {"same", "env"} & styles.keys()
    assert "upsamedownenv and more" in text.plain


def test_what_a_model_says_cannot_steer_the_terminal():
    assert visible("a\x1b[2Jb\x07\x9b\u202e\n\tc") == "a␛[2Jb␇<U+009B><U+202E>\n\tc"
    assert "\x1b" not in rendered(sample(1, "\x1b]0;title\x07", parts={"\x1bx": 1.0})).plain


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: RUN_DIR"),
        (["x", "--sort", "age"], "argument --sort: invalid choice: 'age' (choose from"),
        (["x", "--step", "two"], "argument --step: invalid int value: 'two'"),
        (["x", "--all"], "unrecognized arguments: --all"), (["x", "--step"], "--step: expected one argument"),
        (["nowhere"], "nowhere is no run directory"),
    ],
)
def test_a_wrong_word_is_named(monkeypatch, capsys, words, said):
    code, printed, error = command(monkeypatch, capsys, *words)

    assert (code, printed) == (2, "") and said in error


def test_a_run_without_samples_names_the_settings_that_keep_some(monkeypatch, capsys, tmp_path, run_dir):
    code, _, error = command(monkeypatch, capsys, run_dir, "--step", "9")
    assert code == 2 and "the run has train and eval samples of steps 0 to 3" in error

    (run_dir / "samples.jsonl").unlink()
    code, _, error = command(monkeypatch, capsys, run_dir)
    assert code == 2 and "samples.num_per_step and samples.num_per_eval were 0: raise them" in error
