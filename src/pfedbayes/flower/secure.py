"""Secure aggregation by Flower's SecAgg+, on the nodes: updates are masked before they leave.

Flower supports it only for its older kind of app, with other messages: this module translates between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from torch import Tensor

from pfedbayes.errors import UserError
from pfedbayes.flower.messages import FACTS, Refused, dump_facts, facts_of
from pfedbayes.flower.settings import MIN_SECURE_CLIENTS
from pfedbayes.methods.base import Method

Call = Callable[[Message, Context], Message]
LARGEST_WEIGHT = 10**6  # weights are sent as integers up to this


def mod(message: Message, context: Context, call_next: Call) -> Message:
    """Let Flower handle the messages of secure aggregation; pass on all others.

    Raise an error, which Flower reports to the server, instead of helping to unmask the mean of fewer than three.
    """
    if RECORD_KEY_CONFIGS not in message.content:
        return call_next(message, context)
    configs = message.content.config_records[RECORD_KEY_CONFIGS]
    active = configs.get(Key.ACTIVE_NODE_ID_LIST)
    number = configs.get(Key.SAMPLE_NUMBER) if active is None else len(set(active))
    if number is not None and number < MIN_SECURE_CLIENTS:
        raise Refused(f"the mean of {number} nodes would reveal their updates: {MIN_SECURE_CLIENTS} are needed")
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
        {FACTS: dump_facts(facts)},
    )
    return fitres_to_recorddict(result, keep_input=False)


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
