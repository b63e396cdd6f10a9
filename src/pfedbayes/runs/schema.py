"""What the files of a run folder hold: run.json, the lines of rounds.jsonl and federation.jsonl, and summary.json.

`folder` reads and writes them. The names of the fields are the keys of the JSON objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pfedbayes.engine.plan import Plan
from pfedbayes.evaluation.cross_site import CrossSite
from pfedbayes.files.typed import OMIT_NONE
from pfedbayes.trust.joining import Verdict

FORMAT = 2
UNCHECKED_FORMAT = 1  # the format before: the same files without checksums
Scores = dict[str, dict[str, list[list[float | None]]]]  # {estimator: {metric: [seed][client]}}; null: not finite


@dataclass(frozen=True)
class Hardware:
    """The machine of a run, and the versions of what it ran on."""

    device: str
    """"cpu" or "cuda"."""
    cpu: str
    cores: int | None
    memory_gb: float
    gpu: str | None
    """Name of the GPU; None if there is none."""
    torch: str
    python: str

    @property
    def processor(self) -> str:
        """Name of the GPU or CPU that did the work."""
        return self.gpu or self.device if self.device == "cuda" else self.cpu


@dataclass(frozen=True)
class NodesPlan:
    """How Flower nodes and their server compute."""

    over: Literal["nodes"]
    dtype: str
    wire: str
    """Data type in which arrays travel."""


@dataclass(frozen=True)
class MethodInfo:
    """What a report says about the method of a run."""

    name: str
    """Name in config files."""
    title: str
    personal: bool
    """Whether the method has personal models."""
    shared: bool
    """Whether the method has a shared model."""
    stochastic: bool
    """Whether the method draws weights to predict."""


@dataclass(frozen=True)
class FederationInfo:
    """What a run on Flower adds to run.json."""

    id: str
    settings: dict[str, Any]
    """The settings on which results depend, by "section.key"."""
    left: list[str]
    """Names of the clients that have left for good."""
    keys: list[str | None] | None = field(default=None, metadata=OMIT_NONE)
    """Fingerprint of the key that each client is bound to; None for simulated nodes."""
    rollbacks: list[int] | None = field(default=None, metadata=OMIT_NONE)
    """The rounds to which the operator has gone back, in the order of time."""

    @property
    def privacy_delta(self) -> float:
        """The δ of (ε, δ)-differential privacy."""
        return float(self.settings["federation.privacy_delta"])


@dataclass(frozen=True)
class Resumption:
    """A change of code or machine during a run."""

    after_round: int
    """Rounds trained before the change."""
    time: str
    """In UTC."""
    version: str
    """Version of pfedbayes."""
    commit: str | None
    source: str | None
    hardware: Hardware


@dataclass(frozen=True)
class RunInfo:
    """run.json: who ran what, where, and on which clients.

    Lists with an entry per client cover the scored clients only.
    """

    format: int
    version: str
    """Version of pfedbayes."""
    commit: str | None
    """Commit of the checkout; None for an installed package."""
    created: str
    """Start of the run, in UTC."""
    hardware: Hardware
    plan: Plan | NodesPlan
    seeds: list[int]
    clients: list[str]
    """Names of the clients."""
    train_sizes: list[int]
    """Training examples per client."""
    test_sizes: list[int]
    """Examples per client in the data set of evaluation.split."""
    labels: list[list[int]] | None
    """Labels in the training data of each client; None for a regression and on Flower."""
    num_params: int
    method: MethodInfo
    task: str
    """"classification" or "regression"."""
    digest: str | None = None
    """Identity of the config and the seeds; None for a federation that `pfedbayes.save` wrote."""
    source: str | None = None
    """Digest of the source files of pfedbayes."""
    num_clients: int | None = None
    """Number of all clients, scored or not; None in folders of early versions, which scored all."""
    class_names: list[str] | None = None
    data: str | None = None
    """Description of the user's own data."""
    fingerprint: str | None = None
    """Digest of the user's own data."""
    federation: FederationInfo | None = field(default=None, metadata=OMIT_NONE)
    """Set for runs on Flower."""
    resumed: list[Resumption] = field(default_factory=list)
    """Where the run went on with another version of the code, of torch or of Python, or on another machine."""


@dataclass(frozen=True)
class RoundRecord:
    """A line of rounds.jsonl: the scores of the models after a round."""

    round: int
    seconds: float
    """Seconds of work since the start of the run."""
    personal: Scores | None = None
    shared: Scores | None = None
    absent: list[int] | None = field(default=None, metadata=OMIT_NONE)
    """On Flower: indices of the clients that sent no scores."""
    validation_nll: float | None = field(default=None, metadata=OMIT_NONE)
    """With early stopping: the validation loss."""

    def scores(self, model: str) -> Scores:
        """Return the scores of the "personal" or the "shared" model; empty if it has none."""
        return (self.personal if model == "personal" else self.shared) or {}


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: per confidence bin the mean confidence, the accuracy and the number of predictions."""

    confidence: list[float | None]
    """None for an empty bin."""
    accuracy: list[float | None]
    """None for an empty bin."""
    count: list[float]


@dataclass(frozen=True)
class RiskCoverage:
    """A risk-coverage curve: the error rate among the most confident predictions."""

    coverage: list[float]
    """Share of the predictions that count."""
    risk: list[float]
    """Error rate among them."""
    aurc: float
    """Area under the curve."""
    adaptive_ece: float | None = None
    """Expected calibration error in bins of equal count."""


@dataclass(frozen=True)
class SurvivalCurves:
    """The share of the scored rows without an event until each time, observed and predicted."""

    times: list[float]
    observed: list[float]
    """Kaplan-Meier estimate of all rows."""
    predicted: dict[str, list[float]]
    """By model, the mean prediction over rows and seeds."""


@dataclass(frozen=True)
class ClientFacts:
    """What may explain the uncertainty of the clients; one entry per scored client."""

    distance: list[float | None] | None
    """KL divergence in nats of the personal from the shared model; None unless both are Gaussians."""
    rarest_label: list[int] | None
    """Training examples of a client's rarest label; None for a regression."""


@dataclass(frozen=True)
class Image:
    """A small uint8 image."""

    shape: list[int]
    """Channels, height, width."""
    pixels: str
    """The bytes in base64."""


@dataclass(frozen=True)
class Answer:
    """The prediction of one model for one example."""

    probabilities: list[float | None]
    spread: list[float | None]
    """Standard deviation of each probability over weight draws."""
    entropy: float | None
    """Total uncertainty in nats."""
    mutual_information: float | None
    """Model uncertainty in nats, a part of the entropy."""


@dataclass(frozen=True)
class Example:
    """One scored example of a client, with the answers of the models."""

    client: str
    label: int
    image: Image | None
    personal: Answer | None
    shared: Answer | None


@dataclass(frozen=True)
class FinalAnalysis:
    """What is computed for the final models only; empty where it does not apply."""

    reliability: dict[str, Reliability | None] = field(default_factory=dict)
    """By model, over all seeds and clients."""
    risk_coverage: dict[str, RiskCoverage | None] = field(default_factory=dict)
    """By model, over all seeds and clients."""
    clients: ClientFacts | None = None
    examples: list[Example] = field(default_factory=list)
    pooled: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """By model and metric, scores over the rows of all clients together, mean over seeds; None if undefined."""
    survival: SurvivalCurves | None = field(default=None, metadata=OMIT_NONE)
    """None unless times to an event are predicted."""
    gated: dict[str, list[list[float | None]]] = field(default_factory=dict)
    """By metric, the scores [seed][client] of the gated predictions on the clients' own data; empty without a gate."""


@dataclass(frozen=True)
class JoiningRecord:
    """What joining bought a client. Losses are mean negative log-likelihoods."""

    folds: Verdict
    """By cross-validation. Its conclusion counts, and its `use` is the client's default model."""
    test: Verdict | None = None
    """By test rows, which played no part in the choice of the default; None without test rows."""

    @property
    def client(self) -> str:
        """Name of the client."""
        return self.folds.client


@dataclass(frozen=True, kw_only=True)
class Summary(FinalAnalysis):
    """summary.json: the end of a finished run."""

    rounds: int
    """Rounds trained."""
    seconds: float
    estimator: str
    """The estimator that headlines use."""
    kept_round: int | None = None
    """The round whose models are kept: the best one with early stopping, else the last."""
    joining: list[JoiningRecord] | None = field(default=None, metadata=OMIT_NONE)
    """One record per client; None if no models were trained alone."""
    cross_site: CrossSite | None = field(default=None, metadata=OMIT_NONE)
    """All models on the test data of all clients; None if it was not computed."""


@dataclass(frozen=True)
class JournalEntry:
    """A line of federation.jsonl: one attempt at a round on Flower."""

    round: int
    attempt: int
    """Counted from 1; 0 for the final scoring and for a rollback, which train nothing."""
    seconds: float
    """Seconds of work since the start of the run."""
    down: float
    """Bytes sent to the nodes."""
    up: float
    """Bytes received from the nodes."""
    replies: int
    uploads: int
    """Usable uploads."""
    taken: bool
    """Whether the server used the uploads."""
    refused: dict[str, str]
    """Reasons by client."""
    left: list[str]
    """Names of the clients that have left for good."""
    epsilon: float | None = field(default=None, metadata=OMIT_NONE)
    """With differential privacy: the ε spent so far."""
    time: str | None = field(default=None, metadata=OMIT_NONE)
    """When the entry was written, in UTC."""
    robust: str | None = field(default=None, metadata=OMIT_NONE)
    """How uploads were made robust: "none", "median-norm" or "trimmed-mean"."""
    used: list[str] | None = field(default=None, metadata=OMIT_NONE)
    """Names of the clients whose uploads the server used."""
    joined: dict[str, str] | None = field(default=None, metadata=OMIT_NONE)
    """Clients that have joined, with the fingerprints of their keys."""
    began_anew: list[str] | None = field(default=None, metadata=OMIT_NONE)
    """Clients that had kept no state from before a rollback."""
    rolled_back_from: int | None = field(default=None, metadata=OMIT_NONE)
    """For a rollback: the round that the server had reached. It went back to `round`."""
