"""A machine's cores and GPUs, divided among the jobs that run at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def shares(num_jobs: int, cores: int, gpus: Sequence[str], environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Environment variables for each of the places in which jobs run; nothing is limited for one job alone.

    GPUs are dealt in turn: with fewer GPUs than jobs several jobs get the same one.
    """
    if num_jobs == 1:
        return [{}]
    threads = max(1, cores // num_jobs)
    given = environment.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        threads = min(threads, int(given))
    return [
        {"OMP_NUM_THREADS": str(threads), **_visible(place, num_jobs, gpus)} for place in range(num_jobs)
    ]


def _visible(place: int, num_jobs: int, gpus: Sequence[str]) -> dict[str, str]:
    if not gpus:
        return {}
    own = gpus[place::num_jobs] or [gpus[place % len(gpus)]]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def describe(places: Sequence[Mapping[str, str]]) -> str:
    """Describe for the terminal what jobs that run at once get."""
    threads = f"{len(places)} runs at once with OMP_NUM_THREADS={places[0]['OMP_NUM_THREADS']} each"
    gpus = [place["CUDA_VISIBLE_DEVICES"] for place in places if "CUDA_VISIBLE_DEVICES" in place]
    return f"{threads}, on GPUs {' / '.join(gpus)}" if gpus else threads
