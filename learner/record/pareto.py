"""Pareto archive: the evaluations that no other beats in every component.

`pareto.json` in the run directory holds the front: version and components of every member, by version. Signs are as the
task reports them; a component with a negative weight in `objectives.components` counts as smaller-is-better. Too many
members are thinned where the front is most crowded (Deb et al. 2002, NSGA-II).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from streamrl.algorithms import crowding_distance, domination_count, hypervolume
from streamrl.metrics.files import read_object, write_atomic
from streamrl.metrics.names import member

log = logging.getLogger("streamrl.learner")


class ParetoArchive:
    """Non-dominated evaluations of one run; read back from its file when the run is resumed.

    Args:
        components: name -> weight; the sign says which way is better.
        size: most members.
        reference: name -> value that a member must beat to count in the hypervolume; empty: none is computed.
    """

    def __init__(
        self, path: Path, components: Mapping[str, float], *, size: int, reference: Mapping[str, float]
    ) -> None:
        self._path, self._size = path, size
        self._signs = {name: math.copysign(1.0, weight) for name, weight in sorted(components.items())}
        self._reference = dict(reference)
        self.members: list[dict[str, float]] = []
        if path.exists():
            self.members = self._read()

    def _read(self) -> list[dict[str, float]]:
        found = read_object(self._path).get("members")
        needed = {"version", *self._signs}
        if isinstance(found, list) and all(isinstance(one, dict) and needed <= one.keys() for one in found):
            return found
        log.warning("%s is damaged or has other components: the front starts over", self._path)
        return []

    def add(self, version: int, scores: Mapping[str, float]) -> dict[str, float]:
        """Add an evaluation that has every component, drop what it beats, write the file; metrics of the archive."""
        if any(not math.isfinite(scores.get(name, math.nan)) for name in self._signs):
            return self._metrics()
        entry = {"version": float(version), **{name: float(scores[name]) for name in self._signs}}
        members = [member for member in self.members if member["version"] != entry["version"]] + [entry]
        front = domination_count(self._points(members)) == 0
        members = [member for member, kept in zip(members, front.tolist(), strict=True) if kept]
        while len(members) > self._size:
            members.pop(int(crowding_distance(self._points(members)).argmin()))
        self.members = sorted(members, key=lambda member: member["version"])
        write_atomic(self._path, json.dumps({"members": self.members}, indent=1) + "\n")
        return self._metrics()

    def _metrics(self) -> dict[str, float]:
        found = {"objective/archive_size": float(len(self.members))}
        for name, sign in self._signs.items() if self.members else ():
            values = sorted(sign * one[name] for one in self.members)
            for end, value in (("worst", values[0]), ("best", values[-1]), ("mean", sum(values) / len(values))):
                found[member("objective", f"{name}_{end}")] = sign * value
        if self.members and self._reference:
            reference = torch.tensor([sign * self._reference[name] for name, sign in self._signs.items()])
            found["objective/hypervolume"] = hypervolume(self._points(self.members), reference.double())
        return found

    def _points(self, members: list[dict[str, float]]) -> Tensor:
        return torch.tensor(
            [[sign * member[name] for name, sign in self._signs.items()] for member in members], dtype=torch.float64
        )
