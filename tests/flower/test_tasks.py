"""A node does only what a server can ask for."""

import pytest

from pfedbayes.flower.messages import Refused, require_task

TASK = {
    "federation": "f", "method": "pfedbayes", "nonce": "n", "digest": "d", "round": 2, "client": 0, "last": 1,
    "train": True, "upload": True, "evaluate": False, "finish": False, "rollbacks": [1], "weight": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"round": "2"}, {"round": -1}, {"last": 10**30}, {"rollbacks": 5}, {"rollbacks": ["a"]}, {"weight": 1e9},
     {"weight": "1"}, {"train": 1}, {"nonce": None}, {"client": [0]}, {"last": True}, {"round": 10**9 + 1},
     {"rollbacks": [1, -1]}, {"weight": -0.001}, {"weight": 1.001}],
    ids=str,
)  # fmt: skip
def test_a_node_refuses_a_task_that_no_server_sends(change):
    require_task(TASK)
    with pytest.raises(Refused):
        require_task(TASK | change)
    with pytest.raises(Refused, match="has no"):
        require_task({name: value for name, value in TASK.items() if name not in change})


@pytest.mark.parametrize(
    "change",
    [{"round": 0}, {"round": 10**9}, {"rollbacks": []}, {"rollbacks": [0, 10**9]}, {"weight": 0}, {"weight": 1.0}],
    ids=str,
)
def test_a_node_takes_the_smallest_and_the_largest_numbers(change):
    require_task(TASK | change)
