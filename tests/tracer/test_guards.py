"""Attributes of modules are put back after the forwards of a capture."""

import random

from torch import nn

from pipeloom.tracer.guards import attributes_kept


def test_attributes_are_put_back() -> None:
    layer = nn.Linear(2, 2)
    held = {"items": [1, {2}], "drawn": random.Random(0), "layer": layer}
    layer.held, layer.name = held, "before"
    state = held["drawn"].getstate()
    with attributes_kept(layer):
        held["items"][1].add(3)
        held["items"].append(4)
        held["drawn"].random()
        held["more"] = layer.more = 5
        layer.name = "after"
    assert layer.held is held and held == {"items": [1, {2}], "drawn": held["drawn"], "layer": layer}
    assert held["drawn"].getstate() == state and layer.name == "before" and not hasattr(layer, "more")
