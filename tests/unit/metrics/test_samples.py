"""`samples.jsonl`: what was written comes back, whatever a crash or a full file did to it."""

import pytest

from streamrl.metrics.samples import Sample, SampleFile, SampleTokens, Turn, read_samples


def sample(step: int, kind: str = "train", **changes) -> Sample:
    fields = dict(
        kind=kind, step=step, version=step - 1, lag=0, prompt="1+1=", answer="2", reward=1.0, score=1.0, num_tokens=2,
        group=step, member=0, record=7,
    )
    return Sample(**{**fields, **changes})


def write(path, *samples: Sample, max_bytes: int = 1 << 20, resume_step: int | None = None) -> None:
    file = SampleFile(path, max_bytes=max_bytes, resume_step=resume_step)
    for one in samples:
        file.append([one])


def steps(path, kind: str = "train") -> list[int]:
    return [one.step for one in read_samples(path) if one.kind == kind]


def test_every_field_comes_back(tmp_path):
    full = sample(
        3, fate="zero_std", actor="a0", truncated=True, advantage=-0.5, parts={"format": 1.0}, dataset="held-out",
        expected="17",
        messages=[Turn("assistant", "hm"), Turn("environment", "go on", 0.5)],
        tokens=SampleTokens([4, 5], ["é", "<eos>"], [0.5, None], [2, -1]),
    )

    assert read_samples(tmp_path) == [], "a run without the file"
    write(tmp_path, full, sample(4))

    assert read_samples(tmp_path) == [full, sample(4)]


def test_a_resumed_run_continues_the_file_where_its_checkpoint_is(tmp_path):
    write(tmp_path, sample(0, "eval"), *(sample(step) for step in range(1, 6)))
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"torn')

    write(tmp_path, sample(4), resume_step=3)

    assert (steps(tmp_path, "eval"), steps(tmp_path)) == ([0], [1, 2, 3, 4])
    write(tmp_path, sample(1), resume_step=0)  # it had no checkpoint: everything is done again
    assert (steps(tmp_path, "eval"), steps(tmp_path)) == ([], [1])


@pytest.mark.shows("samples.max_bytes")
def test_a_full_file_keeps_fewer_steps_of_the_whole_run(tmp_path):
    for place, (max_bytes, left) in enumerate({1 << 20: 1, 5_000: 4, 2_500: 8}.items()):
        path = tmp_path / str(place)
        path.mkdir()
        write(path, *(sample(step) for step in range(1, 101)), max_bytes=max_bytes)

        assert steps(path) == list(range(1, 101, left))
        assert (path / "samples.jsonl").stat().st_size <= max_bytes


def test_evaluations_are_thinned_where_they_take_most_of_the_file_and_the_newest_stays(tmp_path):
    write(tmp_path, sample(1), *(sample(10 * n, "eval", answer="2" * 100) for n in range(20)), max_bytes=3_000)

    kept = steps(tmp_path, "eval")
    assert steps(tmp_path) == [1] and kept[0] == 0 and kept[-1] == 190 and 2 < len(kept) < 13
