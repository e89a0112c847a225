"""The garbage collector, kept from looking through what stays."""

import gc

from verl.utils.process import loading


class Node:
    """Part of a cycle."""


def cycle() -> None:
    node = Node()
    node.own = node


def left() -> int:
    return sum(isinstance(thing, Node) for thing in gc.get_objects())


def test_nothing_is_collected_within_and_what_stays_is_frozen():
    frozen = gc.get_freeze_count()
    with loading():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
        cycle()
        assert left() == 1
    assert gc.isenabled() and len(kept) == 1000
    assert gc.get_freeze_count() >= frozen + 1000
    # What nothing refers to any more was not kept with it.
    gc.unfreeze()
    assert left() == 0
