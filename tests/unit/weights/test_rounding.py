"""Scoring with what actors got: rounded inside, exact outside, gradients for the exact weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from learner.model.policy import policy_parameters
from learner.publish.publisher import Publisher
from learner.publish.rounding import with_wire_precision
from streamrl.messages import VersionRef
from streamrl.weights.document import Document
from streamrl.weights.shm.transport import ShmPublisher

NARROW = {"compute_dtype": torch.float32, "wire_dtype": torch.bfloat16}


@pytest.fixture
def shm(tmp_path: Path):
    publisher = ShmPublisher(tmp_path / "shm", "run-1", 2, fallback=tmp_path / "weights")
    yield publisher
    publisher.close()


@pytest.fixture
def module() -> torch.nn.Module:
    torch.manual_seed(4)
    tied = torch.nn.Sequential(torch.nn.Embedding(11, 7), torch.nn.Linear(7, 11, bias=False))
    tied[1].weight = tied[0].weight
    return tied


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_inside_the_policy_is_what_the_document_holds_and_afterwards_it_is_itself_to_the_bit(shm, module):
    publisher = Publisher(policy_parameters(module), wire_dtype=torch.bfloat16, bucket_bytes=64, shm=shm)
    published = publisher.publish(VersionRef(1, 0))
    assert published is not None
    tensors = Document.map_file(published.path, published.manifest, publisher.layout).verify().tensors()
    exact = weights(module)

    with with_wire_precision(module, **NARROW):
        inside = weights(module)

    assert torch.equal(inside[0], tensors["0.weight"].float()) and not torch.equal(inside[0], exact[0])
    assert all(map(torch.equal, weights(module), exact))


def test_gradients_are_taken_at_the_rounded_weights_and_move_the_exact_ones(module):
    exact, tokens = weights(module)[0], torch.arange(11)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
    with with_wire_precision(module, **NARROW):
        module(tokens).square().sum().backward()
    gradient = module[0].weight.grad.clone()
    optimizer.step()

    rounded = exact.to(torch.bfloat16).float().requires_grad_()
    (rounded[tokens] @ rounded.T).square().sum().backward()
    torch.testing.assert_close(gradient, rounded.grad)
    moved = weights(module)[0]
    torch.testing.assert_close(moved, exact - 1e-6 * gradient)
    assert not torch.equal(moved, exact) and (moved.to(torch.bfloat16) == exact.to(torch.bfloat16)).float().mean() > 0.9


def test_an_error_inside_leaves_the_exact_weights(module):
    exact = weights(module)
    with pytest.raises(RuntimeError, match="mid-step"), with_wire_precision(module, **NARROW):
        raise RuntimeError("mid-step")
    assert all(map(torch.equal, weights(module), exact))


@pytest.mark.parametrize(
    ("compute", "wire"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_a_wire_that_holds_every_value_changes_nothing(module, compute, wire):
    exact = weights(module)
    with with_wire_precision(module, compute_dtype=compute, wire_dtype=wire):
        assert all(map(torch.equal, weights(module), exact))
