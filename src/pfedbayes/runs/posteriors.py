"""Uncertainty that is added to deterministic methods after training: the settings of [evaluation] as a method."""

from __future__ import annotations

from pfedbayes.data import DataConfig
from pfedbayes.errors import UserError
from pfedbayes.evaluation.laplace import Laplace, require_gaussian
from pfedbayes.evaluation.posthoc import ensemble
from pfedbayes.evaluation.swag import Swag
from pfedbayes.maths.likelihoods import Likelihood
from pfedbayes.methods.base import Method
from pfedbayes.runs.sections import Evaluation

PLACE = "evaluation.posterior"


def with_posterior(method: Method, evaluation: Evaluation) -> Method:
    """Return the method that a run trains and predicts with."""
    match evaluation.posterior:
        case "laplace":
            return Laplace(method, evaluation.covariance, evaluation.precision)
        case "swag":
            return Swag(method, evaluation.swag_start or 0, evaluation.swag_rank)
        case "ensemble":
            return ensemble(method)
    return method


def check_likelihood(likelihood: Likelihood, evaluation: Evaluation) -> None:
    """Refuse a likelihood for which there is no such posterior."""
    if evaluation.posterior == "laplace":
        require_gaussian(likelihood)


def check_posterior(method: Method, evaluation: Evaluation, data: DataConfig) -> None:
    """Refuse a posterior that the method, the data or other settings rule out."""
    chosen, about = evaluation.posterior, method.about
    if chosen is None:
        return
    if about.stochastic:
        raise UserError(f"{about.title} draws its weights itself: leave {PLACE} out")
    if chosen != "ensemble" and method.needs.keeps_examples:
        raise UserError(
            f"{about.title} has models that are more than the weights of a network: set {PLACE}=ensemble, or leave it "
            "out"
        )
    if chosen == "swag" and about.personal and type(method).prepare is not Method.prepare:
        raise UserError(
            f"{about.title} makes its personal models when they predict, so SWAG finds none to collect: set "
            f"{PLACE}=laplace or ensemble"
        )
    if chosen != "ensemble" and method.needs.eager:
        raise UserError(f"the networks of {about.title} change their size during training: set {PLACE}=ensemble")
    if chosen == "laplace" and evaluation.precision == "validation" and not (data.validation or data.split_column):
        raise UserError(
            "evaluation.precision is 'validation' but data.validation is 0: hold out a fraction of the training data"
        )
    if chosen == "ensemble" and (evaluation.folds or evaluation.alone):
        raise UserError(
            "an ensemble has no cross-validation folds, and no clients alone: set evaluation.folds=0 and "
            "evaluation.alone=false, and data.validation to calibrate it"
        )
