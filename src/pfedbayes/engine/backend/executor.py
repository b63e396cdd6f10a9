"""The execution of rounds as the plan says: in chunks that fit the memory, compiled where that works."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.engine.backend.batches import Batches, Prefetcher
from pfedbayes.engine.backend.compiled import CannotCompile
from pfedbayes.engine.backend.finite import DeferredChecks, require_finite
from pfedbayes.engine.backend.local_training import Drawn, LocalTraining, Trained, Work
from pfedbayes.engine.backend.replayed import FixedSizeBatches
from pfedbayes.engine.participation import Chosen
from pfedbayes.engine.plan import Plan
from pfedbayes.engine.setup import Setup
from pfedbayes.engine.state import FederationState
from pfedbayes.errors import UserError
from pfedbayes.maths.trees import concat, pick, tree_map
from pfedbayes.methods.base import State
from pfedbayes.nets import Model


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    """Return threads that take chunks of clients. Each computes by itself: torch does not split its operations."""
    return ThreadPoolExecutor(threads, "chunks", torch.set_num_threads, (1,))


class Executor:
    """Trains the clients of a round. The plan changes if a compiler or the memory fails.

    model: as it was before the plan changed how it is computed.
    """

    def __init__(self, setup: Setup, plan: Plan, model: Model) -> None:
        self.plan = plan
        self.checks = DeferredChecks(setup)
        self._setup = setup
        self._prefetcher = Prefetcher(setup)
        self._local_training = self._make_local_training()
        # Libraries are fast at convolutions of one network with many images; a compiled network is faster still.
        self._plain_predictor = model._replace(half=setup.model.half)
        self._fast_predictor = setup.model._replace(net=setup.model.net.through(FixedSizeBatches))

    @property
    def predictor(self) -> Model:
        """The model as it is computed for prediction: compiled for images if training is, too rare otherwise to pay."""
        fast = self.plan.graph and self._setup.model.net.convolutional and self._local_training.compiled
        return self._fast_predictor if fast else self._plain_predictor

    def _make_local_training(self) -> LocalTraining:
        setup = self._setup
        return LocalTraining(setup.method, setup.model, setup.data.x, setup.data.y, self.plan, setup.views)

    def train(self, round: int, chosen: Chosen, cursors: NDArray[np.int64], clients: State, received: State) -> Trained:
        """Train the chosen members for a round, from stacked states and downloads.

        A non-finite client is an error, which `checks` finds later if a GPU replays rounds.
        """
        trained = self._train(chosen.members, self._prefetcher.get(round, chosen, cursors), clients, received)
        if not self.plan.graph:
            require_finite(self._setup, round, chosen.members, trained.finite)
        return trained

    def keep_finite(
        self,
        chosen: Chosen,
        finite: Tensor,
        old: tuple[State, FederationState],
        new: tuple[State, FederationState],
    ) -> tuple[State, FederationState]:
        """Return the clients and state to keep after a round; if a GPU replays rounds, it checks them itself."""
        return self.checks.keep_finite(chosen.members, finite, old, new) if self.plan.graph else new

    def _train(self, members: list[int], batches: Batches, clients: State, received: State) -> Trained:
        """Run `client_round` for these members, in chunks that fit the memory."""
        setup = self._setup
        chunk = self.plan.chunk or len(members)
        parts: list[Trained] = []
        trained: Trained
        try:
            if setup.method.needs.full_batch and chunk < len(members) and not self.plan.graph:
                return self._train_by_size(members, batches, chunk, clients, received)
            for start in range(0, len(members), chunk):
                part = slice(start, start + chunk)
                own = pick((clients, received), part)
                trained = self._train_part(members, batches, np.arange(len(members))[part], *own)
                # A replay overwrites what the one before it has returned.
                parts.append(tree_map(torch.clone, trained) if self.plan.graph and chunk < len(members) else trained)
            whole: Trained = concat(parts)
            return whole
        except CannotCompile as reason:
            warnings.warn(f"torch's compiler fails here, so the run continues without it ({reason})", stacklevel=2)
            self.plan = replace(self.plan, compile=False)
        except torch.OutOfMemoryError:
            if chunk == 1:
                raise UserError(
                    "the GPU's memory does not hold even one client: lower training.batch_size or use --device cpu"
                ) from None
            self.plan = replace(self.plan, chunk=(chunk + 1) // 2)
        self._local_training = self._make_local_training()
        torch.cuda.empty_cache()
        return self._train(members, batches, clients, received)

    def _train_by_size(
        self, members: list[int], batches: Batches, chunk: int, clients: State, received: State
    ) -> Trained:
        """Train in chunks of clients with training sets of like size, so that little is padding.

        Threads take the chunks in turn, unless each has to be mapped: torch's vmap is not safe in two threads at once.
        """
        setup = self._setup
        sizes = setup.data.batch_sizes[members]
        order = np.argsort(sizes, kind="stable")
        # The noise, which copies of a client share, is drawn once for all chunks.
        drawn = self._local_training.draw(batches.names, sizes) if self.plan.noise == "torch" else None

        def train(some: NDArray[np.int64]) -> Trained:
            own_clients, own_received = pick((clients, received), setup.send(some))
            return self._train_part(members, batches, some, own_clients, own_received, drawn)

        chunks = np.split(order, range(chunk, len(order), chunk))
        threads = self.plan.threads or torch.get_num_threads()
        in_turn = setup.method.needs.mapped or self.plan.device != "cpu" or threads < 2
        parts = list(map(train, chunks) if in_turn else _workers(threads).map(train, chunks))
        trained: Trained = pick(concat(parts), setup.send(np.argsort(order)))
        return trained

    def _train_part(
        self,
        members: list[int],
        batches: Batches,
        part: NDArray[np.int64],
        clients: State,
        received: State,
        drawn: Drawn | None = None,
    ) -> Trained:
        """Run `client_round` for the members at these places, of which `clients` and `received` are the states.

        drawn: the noise of all members, if it has been drawn.
        """
        setup, ids = self._setup, [members[k] for k in part]
        width = batches.rows.shape[3] if self.plan.graph else int(setup.data.batch_sizes[ids].max())
        shard, weight = setup.of_members((setup.shard, setup.weight), ids)
        names: Tensor | NDArray[np.int64] | Drawn = batches.names[:, part]
        if drawn is not None:
            names = drawn.of(setup.send(part), width)
        elif self.plan.noise == "philox":
            names = setup.send(batches.names[:, part])
        work = Work(setup.send(batches.rows[:, :, part, :width]), weight[:, :width], names)
        return self._local_training(clients, received, shard, work)
