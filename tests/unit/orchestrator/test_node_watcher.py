"""What the picture of the cluster keeps of nodes that are gone."""

from __future__ import annotations

from orchestrator.node_watcher import ClusterView, NodeView, remember_notices


def view(*nodes: NodeView) -> ClusterView:
    return ClusterView(nodes={node.node_id: node for node in nodes})


def node(name: str, deadline_at_s: float | None = None, *, is_alive: bool = True) -> NodeView:
    return NodeView(node_id=name, is_alive=is_alive, resources={}, drain_deadline_at_s=deadline_at_s)


def test_a_node_that_is_gone_keeps_its_notice_whether_it_is_still_listed_or_not() -> None:
    before = view(node("a", 7.0), node("b", 0.0), node("c"))
    after = remember_notices(view(node("a", is_alive=False), node("c")), before)
    assert after.notices() == {"a": 7.0, "b": 0.0}
    assert after.draining() == {"a", "b"}
    assert set(after.living()) == {"c"}
    again = remember_notices(view(node("c", 9.0)), after)
    assert again.notices() == {"a": 7.0, "b": 0.0, "c": 9.0}


def test_a_new_notice_for_a_node_takes_the_place_of_the_last() -> None:
    assert remember_notices(view(node("a", 5.0)), view(node("a", 9.0))).notices() == {"a": 5.0}
