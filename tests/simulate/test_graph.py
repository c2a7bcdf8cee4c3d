"""Tests the walk over a step's events: literal schedules, and what holds for any durations."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulate.steps import LAYOUTS, durations_of, graph_of, random_durations, times_of
from wlb.simulate import PassKind
from wlb.simulate.graph import Graph, Node, NodeKind, is_joint, sorted_graph
from wlb.simulate.order import Action
from wlb.spec import Schedule


def times(schedule: Schedule, v: int, *, message: int = 0) -> list[str]:
    """Returns passes of two ranks, two micro-batches: forward 1, backward 2 (split: 1 and 1)."""
    graph = graph_of(schedule, 2, v, 2)
    durations = durations_of(graph, message=message)
    ends = graph.ends(durations)
    return [times_of(graph, ends, durations, rank) for rank in range(2)]


def test_1f1b_of_two_ranks_and_two_micro_batches() -> None:
    assert times(Schedule.ONE_F_ONE_B, 1) == [
        "0F0 0-1, 0F1 1-2, 0B0 4-6, 0B1 7-9",
        "1F0 1-2, 1B0 2-4, 1F1 4-5, 1B1 5-7",
    ]


def test_1f1b_waits_for_what_it_sends() -> None:
    # Rank 0 sends 0F1 together with receiving 1B0, which rank 1 posts after 1B0: at 5, not at 2.
    assert times(Schedule.ONE_F_ONE_B, 1, message=1) == [
        "0F0 0-1, 0F1 1-2, 0B0 6-8, 0B1 10-12",
        "1F0 2-3, 1B0 3-5, 1F1 6-7, 1B1 7-9",
    ]


def test_interleaving_fills_the_warm_up_with_the_next_chunk() -> None:
    # 15 for stages of half the size, where 1F1B takes 9 for whole ones: 7.5 against 9.
    assert times(Schedule.INTERLEAVED_1F1B, 2) == [
        "0F0 0-1, 0F1 1-2, 2F0 2-3, 2F1 3-4, 2B0 6-8, 2B1 9-11, 0B0 11-13, 0B1 13-15",
        "1F0 1-2, 1F1 2-3, 3F0 3-4, 3B0 4-6, 3F1 6-7, 3B1 7-9, 1B0 9-11, 1B1 11-13",
    ]


def test_interleaving_hides_messages_behind_other_micro_batches() -> None:
    # 0F1 is sent at 2 but received where the list of rank 1 says so: after 1F0, at 3.
    first, second = times(Schedule.INTERLEAVED_1F1B, 2, message=1)
    assert first == "0F0 0-1, 0F1 1-2, 2F0 4-5, 2F1 6-7, 2B0 10-12, 2B1 13-15, 0B0 16-18, 0B1 19-21"
    assert second == "1F0 2-3, 1F1 4-5, 3F0 6-7, 3B0 7-9, 3F1 9-10, 3B1 10-12, 1B0 13-15, 1B1 16-18"


def test_zero_bubble_computes_weights_where_others_wait() -> None:
    assert times(Schedule.INTERLEAVED_ZERO_BUBBLE, 1) == [
        "0F0 0-1, 0F1 1-2, 0I0 3-4, 0W0 4-5, 0I1 5-6, 0W1 6-7",
        "1F0 1-2, 1I0 2-3, 1F1 3-4, 1I1 4-5, 1W0 5-6, 1W1 6-7",
    ]


@pytest.mark.parametrize(
    ("schedule", "v", "step"),
    [
        (Schedule.ONE_F_ONE_B, 1, 3 * (8 + 3)),
        (Schedule.INTERLEAVED_1F1B, 1, 3 * (8 + 3)),
        (Schedule.INTERLEAVED_1F1B, 2, 3 * (2 * 8 + 3)),
        (Schedule.INTERLEAVED_ZERO_BUBBLE, 1, 3 * 8 + 3),
    ],
)
def test_steps_take_what_the_papers_say(schedule: Schedule, v: int, step: int) -> None:
    """Passes are equal, on 4 ranks with 8 micro-batches; interleaved stages are of half the size.

    A step takes (n + (pp - 1) / v) (F + B), and with zero-bubble n (F + I + W) + (pp - 1) (F + I -
    W).
    """
    graph = graph_of(schedule, 4, v, 8)
    assert graph.ends(durations_of(graph)).max() == step


def test_without_a_pipeline_passes_follow_each_other() -> None:
    graph = graph_of(Schedule.ONE_F_ONE_B, 1, 1, 2)
    durations = durations_of(graph)
    ends = graph.ends(durations)
    assert times_of(graph, ends, durations, 0) == "0F0 0-1, 0B0 1-3, 0F1 3-4, 0B1 4-6"


def test_collectives_wait_for_all_pipelines_and_passes_do_not() -> None:
    """Pipelines of 6 and 2 ns meet at a norm of 5."""
    alone, norm = Node(NodeKind.PASS, 0, 0), Node(NodeKind.NORM, -1, -1)
    last = Node(NodeKind.OPTIMIZER, 0, -1)
    graph = Graph(nodes=(alone, norm, last), predecessors=((), (0,), (1,)))
    durations = np.array([[[6, 2]], [[5, 5]], [[1, 3]]])
    assert graph.ends(durations).tolist() == [[[6, 2]], [[11, 11]], [[12, 14]]]
    # The step ends on pipeline 1, which had waited for pipeline 0.
    assert graph.critical_path(graph.ends(durations), durations) == [(0, 0), (1, 1), (2, 1)]


def test_passes_that_meet_start_when_the_last_pipeline_is_ready() -> None:
    """Of four pipelines two and two meet in stage 1; its weights' pass follows its own inputs'."""
    kinds = ((0, PassKind.FORWARD), (1, PassKind.BACKWARD_INPUT), (1, PassKind.BACKWARD_WEIGHT))
    graph = Graph(
        nodes=tuple(Node(NodeKind.PASS, 0, s, Action(s, kind, 0)) for s, kind in kinds),
        predecessors=((), (0,), (1,)),
        pipelines_per_ep_group=2,
        stages_with_experts=frozenset({1}),
    )
    durations = np.array([[[6, 2, 1, 4]], [[5, 5, 5, 5]], [[1, 3, 2, 1]]])
    ends = graph.ends(durations)
    assert ends.tolist() == [[[6, 2, 1, 4]], [[11, 11, 9, 9]], [[12, 14, 11, 10]]]
    assert graph.critical_path(ends, durations) == [(0, 0), (1, 1), (2, 1)]


def test_sorting_names_what_waits_for_each_other() -> None:
    nodes = [Node(NodeKind.NORM, -1, -1), Node(NodeKind.OPTIMIZER, 0, -1)]
    graph, place = sorted_graph(nodes, [[1], []])
    assert [node.kind for node in graph.nodes] == [NodeKind.OPTIMIZER, NodeKind.NORM]
    assert place.tolist() == [1, 0]
    with pytest.raises(ValueError, match="wait for each other: norm, optimizer"):
        sorted_graph(nodes, [[1], [0]])


def test_durations_must_be_of_the_graph() -> None:
    graph = graph_of(Schedule.ONE_F_ONE_B, 2, 1, 2)
    with pytest.raises(ValueError, match="3 rows, but the graph has 16 nodes"):
        graph.ends(np.zeros((3, 1, 1), np.int64))


layouts = st.sampled_from(LAYOUTS)
seeds = st.integers(0, 2**32 - 1)


@given(layouts, st.booleans(), seeds)
def test_order_of_events(layout, has_fsdp: bool, seed: int) -> None:
    """Nothing starts before what it waits for; passes on a rank do not overlap."""
    graph = graph_of(*layout, has_fsdp=has_fsdp)
    durations = random_durations(graph, seed, steps=2, dp=2)
    ends = graph.ends(durations)
    starts = ends - durations
    num_stages = layout[1] * layout[2]
    end_of = {graph.nodes[i].action: ends[i] for i in graph.indices(NodeKind.PASS)}
    by_rank: dict[int, list[int]] = {}
    for i in graph.indices(NodeKind.PASS):
        stage, kind, micro_batch = graph.nodes[i].action
        if kind == PassKind.FORWARD and stage:
            assert (starts[i] >= end_of[stage - 1, kind, micro_batch]).all()
        if kind != PassKind.FORWARD:
            assert (starts[i] >= end_of[stage, PassKind.FORWARD, micro_batch]).all()
        if kind.sends_gradient and stage < num_stages - 1:
            assert (starts[i] >= end_of[stage + 1, kind, micro_batch]).all()
        if kind == PassKind.BACKWARD_WEIGHT:
            assert (starts[i] >= end_of[stage, PassKind.BACKWARD_INPUT, micro_batch]).all()
        by_rank.setdefault(graph.nodes[i].rank, []).append(i)
    for mine in by_rank.values():
        for before, after in itertools.pairwise(mine):
            assert (starts[after] >= ends[before]).all()


@given(layouts, st.booleans(), seeds)
def test_a_step_takes_as_long_as_any_rank_and_any_micro_batch(layout, has_fsdp, seed: int) -> None:
    graph = graph_of(*layout, has_fsdp=has_fsdp)
    durations = random_durations(graph, seed)
    step = graph.ends(durations).max()
    by_rank: dict[int, int] = {}
    by_micro_batch: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        if node.kind == NodeKind.PASS:
            by_rank[node.rank] = by_rank.get(node.rank, 0) + int(durations[i, 0, 0])
        if node.action is not None and node.action.kind != PassKind.BACKWARD_WEIGHT:
            i_mb = node.action.micro_batch
            by_micro_batch[i_mb] = by_micro_batch.get(i_mb, 0) + int(durations[i, 0, 0])
    assert step >= max(by_rank.values())
    # A micro-batch goes through all stages and back, one pass and one message after the other.
    assert step >= max(by_micro_batch.values())


@given(layouts, st.booleans(), seeds, st.integers(1, 100))
def test_more_time_anywhere_never_shortens_a_step(layout, has_fsdp, seed: int, more: int) -> None:
    graph = graph_of(*layout, has_fsdp=has_fsdp)
    durations = random_durations(graph, seed)
    before = graph.ends(durations)
    where = seed % len(graph.nodes)
    durations[where] += more
    after = graph.ends(durations)
    assert (after >= before).all()
    assert after.max() <= before.max() + more


@given(layouts, st.booleans(), seeds)
def test_the_critical_path_has_no_gap(layout, has_fsdp: bool, seed: int) -> None:
    graph = graph_of(*layout, has_fsdp=has_fsdp)
    durations = random_durations(graph, seed, steps=2, dp=3)
    ends = graph.ends(durations)
    for step in range(2):
        path = graph.critical_path(ends, durations, step=step)
        at = 0
        for node, pipeline in path:
            at += int(durations[node, step, pipeline])
            assert at == ends[node, step, pipeline]
        assert at == ends[:, step].max()


@given(layouts, seeds)
def test_pipelines_meet_only_in_collectives(layout, seed: int) -> None:
    """Without FSDP they do not meet until the norm, so that each is as it would be alone."""
    graph = graph_of(*layout)
    durations = random_durations(graph, seed, dp=3)
    together = graph.ends(durations)
    after = (NodeKind.OPTIMIZER, NodeKind.OVERHEAD)
    until_norm = [i for i, node in enumerate(graph.nodes) if node.kind not in after]
    for pipeline in range(3):
        alone = graph.ends(durations[:, :, pipeline : pipeline + 1])
        for i in until_norm:
            same = together[i, 0, pipeline] == alone[i, 0, 0]
            assert same or is_joint(graph.nodes[i])
    norm = graph.indices(NodeKind.NORM)[0]
    assert len(set(together[norm, 0].tolist())) == 1


@given(layouts, st.booleans(), seeds)
def test_steps_do_not_know_of_each_other(layout, has_fsdp: bool, seed: int) -> None:
    graph = graph_of(*layout, has_fsdp=has_fsdp)
    durations = random_durations(graph, seed, steps=3, dp=2)
    together = graph.ends(durations)
    alone = [graph.ends(durations[:, s : s + 1]) for s in range(3)]
    assert np.array_equal(together, np.concatenate(alone, axis=1))
