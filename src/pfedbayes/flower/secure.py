"""Secure aggregation by Flower's SecAgg+: the server learns the weighted mean of the updates and no single one.

Flower supports it only for its older kind of app, with other messages: this module translates between the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import fitres_to_recorddict, parameters_to_arrayrecord
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.serverapp import Grid
from torch import Tensor

from pfedbayes.errors import UserError
from pfedbayes.flower.exchange import Exchange, replies
from pfedbayes.flower.messages import FACTS, Refused, facts_of, num_bytes
from pfedbayes.methods.base import Method

Call = Callable[[Message, Context], Message]
LARGEST_WEIGHT = 10**6  # weights are sent as integers up to this
THRESHOLD = 2 / 3  # the share of nodes that must stay until the end


# On the nodes


def mod(message: Message, context: Context, call_next: Call) -> Message:
    """Let Flower handle the messages of secure aggregation; pass on all others."""
    if RECORD_KEY_CONFIGS not in message.content:
        return call_next(message, context)
    answer: Message = secaggplus_mod(message, context, partial(_upload, call_next))
    return answer


def _upload(call_next: Call, message: Message, context: Context) -> Message:
    """Return an answer that can be masked; raise anything else, which Flower reports to the server."""
    answer = call_next(message, context)
    if FACTS in answer.content:
        raise Refused(facts_of(answer).get("error", "the client has left for good"))
    return answer


def masked_content(facts: dict[str, Any], update: Tensor, weight: float) -> RecordDict:
    """Return an answer whose arrays Flower's `mod` masks before they leave the node."""
    result = FitRes(
        Status(Code.OK, ""),
        ndarrays_to_parameters([update.cpu().double().numpy()]),
        round(weight * LARGEST_WEIGHT),
        {FACTS: json.dumps(facts)},
    )
    return fitres_to_recorddict(result, keep_input=False)


# On the server


def shares(method: Method, server: Tensor, sizes: Tensor) -> Tensor:
    """Return the weights (n,) in the method's average of clients with these sizes, scaled so that the largest is 1."""
    count = len(sizes)
    unit = torch.eye(count, dtype=server.dtype).view(count, *[1] * (server.dim() - 1), count)
    uploads = unit.expand(count, *server.shape[:-1], count)
    clients = torch.arange(count)
    zero = torch.zeros_like(uploads[0])
    mean, twice = (method.aggregate(zero, factor * uploads, sizes, clients) for factor in (1.0, 2.0))
    if not torch.allclose(2 * mean, twice):
        raise UserError(
            f"{method.about.title} with these settings does not average uploads: leave federation.secure out"
        )
    weights: Tensor = mean.reshape(-1, count)[0]
    return weights / weights.max()


class _Counting:
    """The part of a grid that Flower's workflow needs; counts the bytes that pass."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.down = self.up = 0

    def send_and_receive(self, messages: Any, *, timeout: float) -> list[Message]:
        asked = dict(enumerate(messages))
        self.down += sum(num_bytes(message) for message in asked.values())
        answers = [reply for _, reply in replies(self._grid, asked, timeout)]
        self.up += sum(num_bytes(reply) for reply in answers)
        return answers


class _Asking:
    """The part of a strategy that Flower's workflow needs: which nodes to ask, and a place for the mean."""

    def __init__(self, nodes: list[int]) -> None:
        self._nodes = nodes
        self.mean: np.ndarray | None = None
        self.facts: dict[int, dict[str, Any]] = {}

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[tuple[Any, FitIns]]:
        return [(SimpleNamespace(node_id=node), FitIns(parameters, {})) for node in self._nodes]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> tuple[None, dict[str, Any]]:
        self.facts = {proxy.node_id: json.loads(str(result.metrics[FACTS])) for proxy, result in results}
        (self.mean,) = parameters_to_ndarrays(results[0][1].parameters)  # the same for all clients
        return None, {}


def secure_mean(
    grid: Grid, round: int, contents: dict[int, RecordDict], reach: float, timeout: float
) -> tuple[Tensor | None, Exchange]:
    """Return the weighted mean of the nodes' updates, None if too few stayed until the end, and their facts.

    contents: the message to each node; reach: entries of updates are clipped to [-reach, reach].
    """
    asking, counting = _Asking(list(contents)), _Counting(grid)
    context = LegacyContext(Context(0, 0, {}, RecordDict(), {}), strategy=asking)
    context.state[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: round})
    context.state[MAIN_PARAMS_RECORD] = parameters_to_arrayrecord(ndarrays_to_parameters([]), keep_input=False)
    workflow = SecAggPlusWorkflow(
        1.0, THRESHOLD, max_weight=float(LARGEST_WEIGHT), clipping_range=reach, timeout=timeout
    )
    state = WorkflowState()
    if workflow.setup_stage(counting, context, state):
        state.nid_to_fitins = contents
        _ = (
            workflow.share_keys_stage(counting, context, state)
            and workflow.collect_masked_vectors_stage(counting, context, state)
            and workflow.unmask_stage(counting, context, state)
        )
    reasons = "; ".join(str(failure) for failure in state.failures) or "no reply in time"
    exchange = Exchange(down=counting.down, up=counting.up)
    exchange.refused = {
        node: f"dropped out of secure aggregation ({reasons})" for node in contents if node not in asking.facts
    }
    exchange.replies = {node: (facts, None) for node, facts in asking.facts.items()}
    return (None if asking.mean is None else torch.from_numpy(asking.mean)), exchange
