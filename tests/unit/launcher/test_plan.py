import pytest

from relax_hpc.config import Config
from relax_hpc.errors import TopologyError
from relax_hpc.launcher.plan import Plan, build_plan
from relax_hpc.launcher.site import Site
from tests.launcher_samples import HEADLINE, SMALL, config_of, single_headline

SITE = Site(name="test")


def gpus_taken(plan: Plan) -> list[tuple[int, int, int]]:
    """(component, node, GPU) of every GPU of every step."""
    return [
        (part.component, node, gpu)
        for step in plan.steps
        for part in step.parts
        for node in part.nodes
        for rank in step.gpus
        for gpu in rank
    ]


def test_headline_as_het_job() -> None:
    plan = build_plan(config_of(HEADLINE), SITE)
    assert [c.roles for c in plan.components] == [("dcs", "train"), ("rollout",)]
    assert [(c.partition, c.nodes, c.gpus_per_node) for c in plan.components] == [
        ("train", 1, 8),
        ("rollout", 1, 8),
    ]
    assert [s.name for s in plan.steps] == ["dcs-0", "train-0", *(f"rollout-{i}" for i in range(4))]
    train, engine = plan.steps[1], plan.steps[3]
    assert train.gpus == tuple((gpu,) for gpu in range(8))
    assert (engine.num_tasks, engine.gpus) == (1, ((2, 3),))
    assert len(set(gpus_taken(plan))) == 16


def test_headline_in_one_partition() -> None:
    plan = build_plan(single_headline(), SITE)
    assert len(plan.components) == 1
    train = plan.steps[1]
    assert train.parts[0].nodes == (0,)
    assert train.gpus == ((0,), (1,), (2,), (3,))
    engines = [(s.parts[0].nodes, s.gpus) for s in plan.steps[2:]]
    assert engines[:3] == [((0,), ((4, 5),)), ((0,), ((6, 7),)), ((1,), ((0, 1),))]
    taken = gpus_taken(plan)
    assert len(taken) == len(set(taken)) == 16


def test_dcs_component_comes_first_when_it_has_a_partition() -> None:
    config = config_of(HEADLINE, resources__dcs={"partition": "cpu", "cpus_per_rank": 4})
    plan = build_plan(config, SITE)
    assert [c.roles for c in plan.components] == [("dcs",), ("train",), ("rollout",)]
    assert (plan.components[0].gpus_per_node, plan.components[0].cpus_per_node) == (0, 5)
    dcs = plan.steps[0]
    assert [part.component for part in dcs.parts] == [0, 1, 2]  # task 0 = batch host
    assert dcs.num_tasks == 3


def test_dcs_gets_a_step_per_component_where_the_site_forbids_more() -> None:
    plan = build_plan(config_of(HEADLINE), Site(name="test", cross_component_steps=False))
    assert [(s.name, s.num_tasks) for s in plan.steps[:2]] == [("dcs-0", 1), ("dcs-1", 1)]


def test_engine_larger_than_a_node() -> None:
    config = config_of(
        HEADLINE,
        rollout__num_engines=2,
        rollout__engine_tp=16,
        resources__rollout={"ranks": 32, "nodes": 4},
    )
    engines = build_plan(config, SITE).steps[2:]
    assert [s.parts[0].nodes for s in engines] == [(0, 1), (2, 3)]
    assert engines[1].gpus == (tuple(range(8)),)
    assert engines[1].num_tasks == 2


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            config_of(
                HEADLINE,
                resources__layout="single",
                resources__nodes=3,
                resources__train={"ranks": 12},
                train__chunks_per_step=4,
                rollout__num_engines=1,
                resources__rollout={"ranks": 2},
            ),
            "resources.train.ranks=12 does not fit: GPUs left per node are 8, 8, 8",
        ),
        (
            config_of(
                HEADLINE,
                rollout__num_engines=4,
                rollout__engine_tp=3,
                resources__rollout={"ranks": 12, "nodes": 6},
            ),
            "cannot hold engines of engine_tp=3",
        ),
    ],
)
def test_impossible_placements_say_what_is_left(config: Config, says: str) -> None:
    with pytest.raises(TopologyError, match=says):
        build_plan(config, SITE)


def test_cpu_roles_spread_over_the_nodes() -> None:
    config = config_of(
        SMALL,
        resources__launcher="slurm",
        resources__layout="single",
        resources__nodes=4,
        resources__logprob={"ranks": 1},
    )
    plan = build_plan(config, SITE)
    places = {s.name: s.parts[0].nodes for s in plan.steps}
    assert places == {
        "dcs-0": (0, 1, 2, 3),
        "train-0": (0,),
        "logprob-0": (1,),
        "rollout-0": (2,),
        "rollout-1": (3,),
    }


def test_everything_on_one_cpu_node() -> None:
    config = config_of(SMALL, resources__launcher="slurm", resources__layout="single")
    plan = build_plan(config, SITE)
    assert {s.parts[0].nodes for s in plan.steps} == {(0,)}
    assert plan.components[0].cpus_per_node == 6  # 2 train, 2 engines, dcs, agent


def test_local_launcher_has_one_node_and_one_agent() -> None:
    plan = build_plan(config_of(SMALL, resources__rollout={"ranks": 2, "nodes": 2}), SITE)
    assert [(c.nodes, c.roles[0]) for c in plan.components] == [(1, "dcs")]
    assert plan.steps[0].num_tasks == 1


def test_plan_as_json_has_every_step() -> None:
    text = build_plan(single_headline(), SITE).to_json()
    assert text.count('"role": "rollout"') == 6
