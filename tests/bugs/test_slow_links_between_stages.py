"""Cuts for a DAG of stages where messages take longer than the whole model computes.

The bisection of `graphpipe` began at the time of a stage with all ops and no messages, which every stage then
passed: it proposed nothing, and the plan was that of a chain.
"""

from branching_graphs import random_graph, request_for

from pipeloom.planner.branches import BranchOrdered
from pipeloom.planner.strategies.graphpipe import shallow_cuts


def test_messages_that_take_longer_than_the_model_computes():
    graph, profile = random_graph(3, 8, "series-parallel")
    search = request_for(graph, profile, 3, bytes_per_s=0.01).search(BranchOrdered(tuple(range(8)), (0,)))
    cuts = next(shallow_cuts(search))
    assert cuts[0] == 0 and cuts[-1] == 8 and len(cuts) == 4
