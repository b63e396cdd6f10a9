"""Secure aggregation by Flower's SecAgg+, on the server: it learns the weighted mean of the updates and no single one.

The nodes run Flower's own code (see `secure`). Flower's code for the server believes every reply. Here each is checked
before it is used, a node with a malformed one is left out, and nothing is unmasked for too few.

setup     every node sends two public keys
share     every node sends each other node encrypted shares of its secrets
collect   every node trains and sends its masked update
unmask    every node sends the shares that remove the masks from the sum
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.flower.exchange import Exchange, replies
from pfedbayes.flower.messages import FACTS, Refused, num_bytes, parse_facts
from pfedbayes.flower.secure import LARGEST_WEIGHT

THRESHOLD = 2 / 3  # the share of nodes that must stay until the end
TARGET = 2**22  # entries of updates become whole numbers up to this
MODULUS = 2**32  # of the masks
LONGEST_SECRET = 2**12  # bytes of a key, a share or a ciphertext
SEED_BYTES = 32  # of a node's own mask
METRICS = "fitres.metrics"  # where Flower puts our facts
BAD_KEY = "its public keys are malformed"
BAD_VECTOR = "its masked update is malformed"
BAD_SHARES = "the shares of a secret do not fit each other"
T = TypeVar("T")
Record = dict[str, Any]
Check = Callable[[int, Record, Message], T]


class SecureMean:
    """One attempt at a secure mean of the updates of nodes with these weights.

    group: Flower's name of the round; shape: of an update; reach: its entries are clipped to [-reach, reach]; refuse:
    checks the facts of a node. Nodes that fail are in `exchange.refused`, with the reason.
    """

    def __init__(
        self,
        grid: Grid,
        group: str,
        weights: dict[int, float],
        shape: torch.Size,
        reach: float,
        timeout: float,
        refuse: Callable[[int, dict[str, Any]], None],
    ) -> None:
        self._grid, self._group, self._timeout = grid, group, timeout
        self._weights, self._shape, self._reach, self._refuse = weights, shape, reach, refuse
        self._threshold = max(round(THRESHOLD * len(weights)), 2)
        self.exchange = Exchange()

    def mean(self, contents: dict[int, RecordDict], least: int) -> Tensor:
        """Return the weighted mean of the updates of the nodes in `exchange.replies`; raise Refused if there is none.

        contents: the message to each node; least: the smallest number of updates whose mean may be unmasked.
        """
        least = max(least, self._threshold)
        keys = self._setup()
        self._require(keys, least)
        shares = self._share(keys)
        self._require(shares, least)
        vectors = self._collect(contents, shares)
        self._require(vectors, least)
        dropped = shares.keys() - vectors.keys()
        secrets = self._unmask(sorted(vectors), sorted(dropped))
        return self._reveal(keys, list(vectors.values()), secrets, dropped)

    def _require(self, present: dict[int, Any], least: int) -> None:
        if len(present) < least:
            raise Refused(f"{len(present)} of {len(self._weights)} nodes stayed, but {least} are needed")

    def _ask(self, stage: str, contents: dict[int, RecordDict], check: Check[T]) -> dict[int, T]:
        """Send each node its message of a stage, and return what `check` makes of the replies."""
        messages = {
            node: Message(content, node, "train", ttl=self._timeout, group_id=self._group)
            for node, content in contents.items()
        }
        self.exchange.down += sum(num_bytes(message) for message in messages.values())
        reasons = dict.fromkeys(messages, f"no reply within {self._timeout:g} s")
        found = {}
        for node, reply in replies(self._grid, messages, self._timeout):
            self.exchange.up += num_bytes(reply)
            try:
                found[node] = check(node, _record_of(reply), reply)
                del reasons[node]
            except Refused as error:
                reasons[node] = str(error)
        for node, reason in reasons.items():
            self._drop(node, stage, reason)
        return found

    def _drop(self, node: int, stage: str, reason: str) -> None:
        self.exchange.refused[node] = f"dropped out of secure aggregation ({stage}: {reason})"

    def _setup(self) -> dict[int, list[bytes]]:
        """Return the two public keys of each node."""
        record = {
            Key.SAMPLE_NUMBER: len(self._weights),
            Key.SHARE_NUMBER: len(self._weights),
            Key.THRESHOLD: self._threshold,
            Key.CLIPPING_RANGE: float(self._reach),
            Key.TARGET_RANGE: TARGET,
            Key.MOD_RANGE: MODULUS,
            Key.MAX_WEIGHT: float(LARGEST_WEIGHT),
        }
        contents = {node: _content(Stage.SETUP, record) for node in self._weights}
        keys = self._ask(Stage.SETUP, contents, _public_keys)
        uses = Counter(key for pair in keys.values() for key in pair)
        for node in [node for node, pair in keys.items() if any(uses[key] > 1 for key in pair)]:
            self._drop(node, Stage.SETUP, "its keys are not its own")
            del keys[node]
        return keys

    def _share(self, keys: dict[int, list[bytes]]) -> dict[int, dict[int, bytes]]:
        """Return the ciphertexts of each node, by their recipients."""
        record = {str(node): pair for node, pair in keys.items()}

        def check(node: int, answer: Record, _: Message) -> dict[int, bytes]:
            return _pairs(answer, Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST, keys.keys() - {node})

        return self._ask(Stage.SHARE_KEYS, {node: _content(Stage.SHARE_KEYS, record) for node in keys}, check)

    def _collect(
        self, contents: dict[int, RecordDict], shares: dict[int, dict[int, bytes]]
    ) -> dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return each node's masked weight (1,) and masked update (T,), and keep its facts."""
        for node in shares:
            sources = [source for source in shares if source != node]
            received = {Key.SOURCE_LIST: sources, Key.CIPHERTEXT_LIST: [shares[source][node] for source in sources]}
            own = _content(Stage.COLLECT_MASKED_VECTORS, received)
            contents[node].config_records[RECORD_KEY_CONFIGS] = own.config_records[RECORD_KEY_CONFIGS]

        def check(node: int, answer: Record, reply: Message) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            facts = parse_facts(reply.content.config_records.get(METRICS, {}).get(FACTS))
            self._refuse(node, facts)
            parts = answer.get(Key.MASKED_PARAMETERS)
            if not isinstance(parts, list) or len(parts) != 2:
                raise Refused(BAD_VECTOR)
            vector = _numbers(parts[0], 1), _numbers(parts[1], self._shape.numel())
            self.exchange.replies[node] = (facts, None)
            return vector

        return self._ask(Stage.COLLECT_MASKED_VECTORS, {node: contents[node] for node in shares}, check)

    def _unmask(self, active: list[int], dropped: list[int]) -> dict[int, bytes]:
        """Return the secrets that remove the masks, put together from shares: a seed or, if it dropped out, a key."""
        wanted = {*active, *dropped}
        lists = {Key.ACTIVE_NODE_ID_LIST: active, Key.DEAD_NODE_ID_LIST: dropped}
        found = self._ask(
            Stage.UNMASK,
            {node: _content(Stage.UNMASK, lists) for node in active},
            lambda node, answer, _: _pairs(answer, Key.NODE_ID_LIST, Key.SHARE_LIST, wanted),
        )
        if len(found) < self._threshold:
            raise Refused(f"{len(found)} nodes sent shares to unmask the mean, but {self._threshold} are needed")
        secrets = {}
        for node in wanted:
            own = [shares[node] for shares in found.values()]
            if len({len(share) for share in own}) > 1 or len(own[0]) % 16 != 4:
                raise Refused(BAD_SHARES)
            try:
                secrets[node] = combine_shares(own)
            except ValueError:
                raise Refused(BAD_SHARES) from None
        return secrets

    def _reveal(
        self,
        keys: dict[int, list[bytes]],
        vectors: list[tuple[NDArray[np.int64], NDArray[np.int64]]],
        secrets: dict[int, bytes],
        dropped: set[int],
    ) -> Tensor:
        """Add up the vectors, remove the masks and return the weighted mean; refuse it if masks remain."""
        factor, total = (np.sum(parts, axis=0) for parts in zip(*vectors, strict=True))
        active = [node for node in secrets if node not in dropped]
        for node, secret in secrets.items():
            for sign, seed in _masks(node, secret, keys, active, node in dropped):
                factor_mask, mask = pseudo_rand_gen(seed, MODULUS, [(1,), (self._shape.numel(),)])
                factor, total = factor + sign * factor_mask, total + sign * mask
        factor, total = factor % MODULUS, total % MODULUS
        weight = sum(_quantized(self._weights[node]) for node in active)
        if int(factor[0]) != weight or int(total.max(initial=0)) > len(active) * TARGET:
            raise Refused("the masks do not cancel out: a node sent wrong shares or a wrong weight")
        mean = (total * (2 * self._reach / TARGET) - len(active) * self._reach) * (TARGET / weight)
        return torch.from_numpy(mean).view(self._shape)


def _quantized(weight: float) -> int:
    """Return a weight as a node adds it to the sum."""
    return round(round(weight * LARGEST_WEIGHT) / LARGEST_WEIGHT * TARGET)


def _content(stage: str, record: Record) -> RecordDict:
    return RecordDict({RECORD_KEY_CONFIGS: ConfigRecord({**record, Key.STAGE: stage})})


def _record_of(reply: Message) -> Record:
    """Return what a node answers to a message of secure aggregation."""
    if reply.has_error():
        lines = (reply.error.reason or "").strip().splitlines() or ["no reason given"]
        raise Refused(lines[-1])
    if not isinstance(reply.content, RecordDict) or RECORD_KEY_CONFIGS not in reply.content.config_records:
        raise Refused("its reply is not one of secure aggregation")
    return dict(reply.content.config_records[RECORD_KEY_CONFIGS])


def _public_keys(_: int, answer: Record, __: Message) -> list[bytes]:
    keys = []
    for key in (answer.get(Key.PUBLIC_KEY_1), answer.get(Key.PUBLIC_KEY_2)):
        if not isinstance(key, bytes) or len(key) > LONGEST_SECRET:
            raise Refused(BAD_KEY)
        _public_key(key)
        keys.append(key)
    return keys


def _public_key(content: bytes) -> ec.EllipticCurvePublicKey:
    """Return a public key of Flower's curve from PEM; refuse anything else."""
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        raise Refused(BAD_KEY) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise Refused(BAD_KEY)
    return key


def _pairs(answer: Record, nodes: str, values: str, wanted: set[int]) -> dict[int, bytes]:
    """Return the values of a reply by node; refuse other nodes than those wanted, and what is no short bytes."""
    names, found = answer.get(nodes), answer.get(values)
    if not isinstance(names, list) or not isinstance(found, list) or len(names) != len(found):
        raise Refused(f"its {values} are malformed")
    if len(names) != len(wanted) or set(names) != wanted:
        raise Refused(f"its {values} are for other nodes than those asked for")
    if not all(isinstance(value, bytes) and len(value) <= LONGEST_SECRET for value in found):
        raise Refused(f"its {values} are malformed")
    return dict(zip(names, found, strict=True))


def _numbers(content: Any, count: int) -> NDArray[np.int64]:
    """Return whole numbers (count,) below the modulus from the bytes of an NPY file with int64."""
    start = len(content) - 8 * count if isinstance(content, bytes) else 0
    header = content[:start] if start > 10 else b""
    if header[:8] != b"\x93NUMPY\x01\x00" or int.from_bytes(header[8:10], "little") != start - 10:
        raise Refused(BAD_VECTOR)
    if b"'<i8'" not in header or b"'fortran_order': False" not in header:
        raise Refused(BAD_VECTOR)
    numbers = np.frombuffer(content, dtype="<i8", offset=start)
    if not ((numbers >= 0) & (numbers < MODULUS)).all():
        raise Refused(BAD_VECTOR)
    return numbers


def _masks(
    node: int, secret: bytes, keys: dict[int, list[bytes]], active: list[int], is_dropped: bool
) -> list[tuple[int, bytes]]:
    """Return seeds of masks and the sign with which each is added to the sum, to remove it."""
    if not is_dropped:
        if len(secret) != SEED_BYTES:
            raise Refused(BAD_SHARES)
        return [(-1, secret)]
    try:
        private = load_pem_private_key(secret, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise Refused(BAD_SHARES) from None
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != _public_key(keys[node][0]):
        raise Refused(BAD_SHARES)
    # The active node has added the mask if its number is the larger one, else subtracted it.
    return [(1 if node > other else -1, generate_shared_key(private, _public_key(keys[other][0]))) for other in active]
