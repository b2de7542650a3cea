"""Values that one case runs through: a case of pytest's own costs more than most of these checks."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def each(name: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once per value, in one case; a failure is told with its value.

    Unlike with `pytest.mark.parametrize` the values share the test's fixtures, so it suits tests of pure functions.
    """
    kept = tuple(values)
    assert kept, f"no value of {name}: nothing would be tested"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            for value in kept:
                try:
                    test(**fixtures, **{name: value})
                except BaseException as error:
                    error.add_note(f"{name}={value!r}")
                    raise

        signature = inspect.signature(test)
        others = [parameter for key, parameter in signature.parameters.items() if key != name]
        assert len(others) < len(signature.parameters), f"{test.__name__} takes no {name}"
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate
