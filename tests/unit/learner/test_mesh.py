"""The device mesh: who shards, who shares data, who writes, for layouts that one test machine could not run."""

from itertools import product

import pytest
import torch

from learner.hub.handlers.ranks import share_batch
from learner.objective.plan import BatchPlan
from learner.ranks.mesh import Coordinates, Mesh, Ranks
from streamrl.errors import ConfigError, ContentError
from tests.kit.learning import batch, make_objective, plan_of
from tests.unit.hub.ledger.test_batches import held

LAYOUTS = [
    Mesh.from_world_size(world * replicate * context * tensor, replicate=replicate, context=context, tensor=tensor)
    for world, replicate, context, tensor in product((1, 3), (1, 2), (1, 2), (1, 4))
]


def test_ranks_are_laid_out_with_the_tensor_axis_fastest():
    mesh = Mesh.from_world_size(8, tensor=2, context=2)

    assert [mesh.coordinates(rank) for rank in (0, 1, 2, 3, 4, 7)] == [
        (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1), (0, 1, 0, 0), (0, 1, 1, 1),
    ]
    assert (mesh.world, mesh.dp_size, mesh.dp_ranks) == (8, 2, (0, 0, 0, 0, 1, 1, 1, 1))


@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_every_place_is_taken_once_and_each_share_and_each_shard_has_one_first_rank(mesh):
    ranks = range(mesh.world)
    places = [mesh.coordinates(rank) for rank in ranks]

    sizes = (mesh.replicate, mesh.shard, mesh.context, mesh.tensor)
    assert set(places) == {Coordinates(*place) for place in product(*map(range, sizes))}
    assert len(places) == mesh.world == mesh.dp_size * mesh.context * mesh.tensor
    assert [mesh.dp_ranks[rank] for rank in ranks if mesh.is_first_of_share(rank)] == list(range(mesh.dp_size))
    for axes in (("shard",), ("shard", "tensor"), ("replicate", "shard"), ()):
        parts = [tuple(getattr(at, axis) for axis in axes) for rank, at in enumerate(places)
                 if mesh.is_first_with(rank, axes)]
        assert sorted(parts) == list(product(*(range(getattr(mesh, axis)) for axis in axes)))
    for one, other in product(ranks, ranks):
        same_data = places[one][:2] == places[other][:2]
        assert (mesh.dp_ranks[one] == mesh.dp_ranks[other]) is same_data


def test_axes_that_do_not_divide_the_number_of_processes_are_refused():
    with pytest.raises(ValueError, match="6 learner processes cannot form a learner.mesh of replicate=1, context=2, "):
        Mesh.from_world_size(6, context=2, tensor=2)
    for shard in (1, 3, 4):
        with pytest.raises(ConfigError, match=f"4 .* replicate=2, shard={shard}, .*num_learner_ranks to {2 * shard}, "):
            Mesh.from_world_size(4, replicate=2, shard=shard)
    assert Mesh.from_world_size(4, replicate=2, shard=2) == Mesh.from_world_size(4, replicate=2)


def test_a_batch_is_split_by_data_parallel_rank_and_not_by_process():
    mesh, groups = Mesh.from_world_size(8, tensor=2, context=2), [held(i, tokens=1 + i) for i in range(3)]

    shares = share_batch(groups, 5, mesh.dp_ranks)

    assert len(shares) == mesh.world and {row.rank for row in shares[0].plan} == {0, 1}
    assert shares[:4] == [shares[0]] * 4 and shares[4:] == [shares[4]] * 4 != shares[:4]
    assert sum(len(shares[rank].groups) for rank in range(8) if mesh.is_first_of_share(rank)) == len(groups)


def test_the_objective_looks_up_its_trajectories_by_data_parallel_rank():
    rows = batch(4, 2)
    plan = plan_of(rows, world=2)
    objective = make_objective()
    ranks = Ranks(rank=3, mesh=Mesh.from_world_size(4, tensor=2))

    BatchPlan.from_batch(objective, [row for row in rows if row.group_id % 2 == 1], plan, version=5, ranks=ranks)
    with pytest.raises(ContentError, match="rank 1 holds other trajectories"):
        BatchPlan.from_batch(objective, [row for row in rows if row.group_id % 2 == 0], plan, version=5, ranks=ranks)


@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_sums_count_each_share_of_the_batch_and_each_part_of_the_model_once(mesh, monkeypatch):
    # Leaves what this rank would add.
    monkeypatch.setattr("learner.ranks.mesh.dist.all_reduce", lambda tensor, op, group=None: None)
    ranks = [Ranks(rank=rank, mesh=mesh) for rank in range(mesh.world)]

    assert sum(one.all_reduce([1.0])[0] for one in ranks) == mesh.dp_size
    assert sum(one.add(float(one.owns(torch.ones(1)))) for one in ranks) == 1.0
    assert sum(one.from_rank_zero(7.0) for one in ranks) == 7.0
