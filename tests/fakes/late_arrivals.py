"""A stand-in, on a CPU, for a GPU whose results come late. Passes themselves run where they are launched."""

from __future__ import annotations

from torch import Tensor

from actors.engines.native.transfers import Arrival


class LateArrivals:
    """Makes `Arrival`s, as the scheduler does, that hold nothing but NaN until the host waits for them.

    Attributes:
        order: "launch" and "read" with the number of the pass, as they happened.
        drawn: tokens of all passes.
    """

    def __init__(self) -> None:
        self.order: list[tuple[str, int]] = []
        self.drawn = 0

    def __call__(self, tokens: Tensor, logprobs: Tensor) -> Arrival:
        number = sum(what == "launch" for what, _ in self.order)
        self.order.append(("launch", number))
        self.drawn += len(tokens)
        return _Late(self, number, tokens, logprobs)

    @property
    def behind(self) -> int:
        """Passes that were launched before the tokens of the last one were read."""
        launch, read = (
            {number: at for at, (what, number) in enumerate(self.order) if what == which}
            for which in ("launch", "read")
        )
        return sum(at < read.get(number - 1, 0) for number, at in launch.items())


class _Late(Arrival):
    def __init__(self, log: LateArrivals, number: int, tokens: Tensor, logprobs: Tensor) -> None:
        super().__init__(tokens, logprobs)
        self._log, self._number = log, number
        self._there = self._host.clone()
        self._host.fill_(float("nan"))

    def read(self) -> tuple[list[int], list[float]]:
        self._log.order.append(("read", self._number))
        self._host.copy_(self._there)
        return super().read()
