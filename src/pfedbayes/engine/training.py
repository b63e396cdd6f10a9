"""The configuration of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pfedbayes.constraints import AtLeastOne, Count, CountOrZero, Interval, NonNegative, Seed, check
from pfedbayes.methods.base import Method

TrainedClients = Literal["all", "chosen"]


@dataclass(frozen=True)
class Training:
    """How long and how clients train, who takes part, and when models are evaluated."""

    rounds: Annotated[int, Interval(at_least=1, at_most=10**7)] = 200
    """The number of communication rounds."""
    local_steps: Count = 20
    """The number R of mini-batch steps per client and round."""
    batch_size: AtLeastOne[int] = 100
    """The size b of a mini-batch."""
    participants: AtLeastOne[int] | None = None
    """The number S of clients whose uploads are averaged in a round; None for all."""
    train: TrainedClients | None = None
    """Train "all" N clients in a round or only the "chosen" S; None for the method's default."""
    evaluate_every: AtLeastOne[int] = 10
    """Evaluate every this many rounds, and after the last one."""
    evaluate_window: tuple[int, int] | None = None
    """First and last of the rounds that are all evaluated."""
    seed: Seed = 1
    """The seed of the run."""
    flip: bool = False
    """Mirror each image of a mini-batch left to right with probability 1/2."""
    shift: CountOrZero = 0
    """Shift each image by up to this many pixels vertically and horizontally; its edge is repeated."""
    server_optimizer: Literal["none", "momentum", "adam"] = "none"
    """How the server moves towards the average of the uploads (FedOpt); the widths of Gaussians are always averaged."""
    server_rate: NonNegative[float] = 1.0
    """The learning rate of the server optimiser."""
    server_momentum: Annotated[float, Interval(at_least=0, less_than=1)] = 0.9
    """The momentum (beta1 of Adam) of the server optimiser."""
    patience: AtLeastOne[int] | None = None
    """Stop after this many rounds without improvement in validation loss, and keep the best round; None for never."""

    def __post_init__(self) -> None:
        check(self)
        if self.evaluate_window and not 1 <= self.evaluate_window[0] <= self.evaluate_window[1]:
            raise ValueError(
                f"evaluate_window must be [first, last] with 1 <= first <= last, got {self.evaluate_window}"
            )

    def evaluates(self, round: int) -> bool:
        """Return whether models are evaluated after this round."""
        in_window = self.evaluate_window is not None and self.evaluate_window[0] <= round <= self.evaluate_window[1]
        return in_window or round % self.evaluate_every == 0 or round == self.rounds

    def trained_clients(self, method: Method) -> TrainedClients:
        """Return which clients train in a round."""
        return self.train or method.habits.trains
