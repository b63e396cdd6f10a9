"""Slow proofs: what is promised about new examples is kept, over 20 federations of ten clients that share nothing but
MNIST: each has its own split of it and its own seed."""

from typing import NamedTuple

import pytest
import torch

from pfedbayes.data import load_shards
from pfedbayes.evaluation.estimators import EstimatorSpec
from pfedbayes.maths.intervals import at_most, binomial_lower
from pfedbayes.maths.metrics import confidence, log_average
from pfedbayes.runs.experiment import build_federation, read_experiment
from pfedbayes.trust import abstention, conformal
from pfedbayes.trust.certificate import Certificate, certify

SEEDS = range(1, 21)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Outcome(NamedTuple):
    """Log-probabilities of the personal models and labels on all clients' validation and test data; certificates."""

    validation: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    certificates: list[Certificate]


def said(federation, split):
    """Log-probabilities (clients * n, C) and labels of the personal models by ten draws."""
    parts = [
        (log_average(block.outputs["mc10"]).flatten(0, 1), block.y.flatten())
        for block in federation.blocks("personal", split, EstimatorSpec(10, ("mc10",), "activations"))
    ]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


@pytest.fixture(scope="module")
def outcomes():
    """Medium MNIST, 300 of each client's 1,000 examples to calibrate on, half of the others to certify with; a few
    rounds at a rate that makes the most of them."""
    found = []
    for seed in SEEDS:
        settings = ["data.size=medium", "data.validation=0.3", "data.certify=0.5", f"data.seed={seed}",
                    f"training.seed={seed}", "training.rounds=6", "method.rho0=-3.5", "method.eta_personal=0.003",
                    "method.eta_global=0.003"]  # fmt: skip
        experiment = read_experiment(None, settings)
        federation = build_federation(experiment, load_shards(experiment.data), [seed], device="cpu")
        for _ in federation.rounds():
            pass
        certificates = certify(federation, steps=40)
        found.append(Outcome(said(federation, "validation"), said(federation, "test"), certificates))
    return found


def test_certificates_keep_their_word_and_say_something(outcomes):
    certificates = [one for outcome in outcomes for one in outcome.certificates]
    assert len(certificates) == 200
    bounds = torch.tensor([one.bound for one in certificates])
    gaps = torch.tensor([one.bound - one.test.gibbs for one in certificates])
    print(f"certificates: median {bounds.median():.3f}, largest {bounds.max():.3f}, least gap {gaps.min():.3f}")
    # Each certificate may fail with probability 0.05, and a test error is itself measured on a sample.
    broken = sum(
        binomial_lower(round(one.test.gibbs * one.test.size), one.test.size, 0.05) > one.bound for one in certificates
    )
    print(f"certificates that are broken for sure: {broken} of 200")
    assert at_most(broken - 1, 200, 0.05) < 0.999
    assert bounds.median() < 0.15
    # The plain bound on the averaged prediction fails in at most its share of clients, but for chance.
    fails = sum(
        binomial_lower(round(one.test.mc * one.test.size), one.test.size, 0.05) > one.hold_out for one in certificates
    )
    assert at_most(fails - 1, 200, 0.05) < 0.999


# The coverage of one federation has a standard deviation of 0.0057, by its 3,000 calibration examples. With APS, whose
# scores are partly random, one of these 20 lies 3.6 of them below, at 0.8795.
@pytest.mark.parametrize(("kind", "tolerance"), [("lac", 0.02), ("aps", 0.025)])
def test_conformal_sets_at_90_percent_cover_90_percent(outcomes, kind, tolerance):
    covered = []
    for k, outcome in enumerate(outcomes):
        scores = []
        for part, (log_probs, _) in enumerate((outcome.validation, outcome.test)):
            generator = torch.Generator().manual_seed(2 * k + part)
            u = torch.rand(len(log_probs), generator=generator) if kind == "aps" else None
            scores.append(conformal.label_scores(log_probs, u))
        calibration = conformal.calibrate(conformal.true_scores(scores[0], outcome.validation[1]), 0.1, "federation")
        sets = conformal.label_sets(scores[1], calibration)
        covered.append(float(sets.gather(-1, outcome.test[1][:, None]).double().mean()))
    print(f"{kind}: {min(covered):.4f} to {max(covered):.4f}, mean {sum(covered) / len(covered):.4f}")
    assert all(abs(share - 0.9) <= tolerance for share in covered)
    assert abs(sum(covered) / len(covered) - 0.9) < 0.004  # three standard errors


def test_abstention_at_one_percent_keeps_its_word(outcomes):
    broken, answered = 0, []
    for outcome in outcomes:
        log_probs, y = outcome.validation
        rule = abstention.calibrate(confidence(log_probs), log_probs.argmax(-1) != y, target=0.01, delta=0.05)
        log_probs, y = outcome.test
        chosen = rule.answers(confidence(log_probs))
        errors = int((log_probs.argmax(-1) != y)[chosen].sum())
        answered.append(float(chosen.double().mean()))
        # Broken for sure: even the lower end of the interval of the measured error lies above the target.
        broken += bool(chosen.any()) and binomial_lower(errors, int(chosen.sum()), 0.05) > 0.01
    print(f"answered: {min(answered):.3f} to {max(answered):.3f}; broken {broken} of {len(outcomes)}")
    assert at_most(broken - 1, len(outcomes), 0.05) < 0.999
    assert sum(answered) / len(answered) > 0.2
