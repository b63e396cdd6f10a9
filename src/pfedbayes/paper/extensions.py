"""Which runs of pFedBayes are Algorithm 1, and which extend it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from pfedbayes.methods import METHODS, PFedBayes
from pfedbayes.sweep.scores import Record

EXTENDED = "extended pFedBayes"
# Settings that replace a step of Algorithm 1, with what they do instead.
EXTENSIONS = {
    "method.scale": "the likelihood in Eq. (27) is not scaled by n/b",
    "method.eta_data": "the mean of w takes FedAvg's gradient step instead of the KL step of Eq. (28)",
    "method.sigma_by_size": "the first standard deviations of q shrink with the size of the training set",
    "method.server": "the server combines the clients by Lemma A.2 instead of averaging (μ, ρ)",
    "method.hyper_weight": "the hyper-prior of the server's problem has another weight",
    "method.hyper_sigma": "the hyper-prior of the server's problem expects another spread",
    "method.noise_std": "the weight noise g has another standard deviation than 1",
    "method.personal_steps": "several steps on q per step on w",
    "method.reset_personal": "q restarts every round at the received w",
    "method.prior": "the prior stays at the received w during a round",
    "method.optimizer": "plain gradient descent instead of Adam",
    "training.server_optimizer": "the server applies momentum or Adam to the mean",
}


def extensions(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings by which a run of pFedBayes departs from Algorithm 1, from its recorded settings."""
    fields = {field.name for field in dataclasses.fields(PFedBayes)}
    own = {key.removeprefix("method."): value for key, value in settings.items() if key.startswith("method.")}
    method = PFedBayes(**{name: value for name, value in own.items() if name in fields})
    departs = [f"method.{name}" for name in method.extensions]
    if settings.get("training.server_optimizer", "none") != "none":
        departs.append("training.server_optimizer")
    return tuple(key for key in EXTENSIONS if key in departs)


def title(method: str, records: Iterable[Record]) -> str:
    """Return the name of what these runs train: pFedBayes with an extension is not called pFedBayes."""
    if method == "pfedbayes" and any(extensions(record.get("settings", {})) for record in records):
        return EXTENDED
    return METHODS[method].about.title
