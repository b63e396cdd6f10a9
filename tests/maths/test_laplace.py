import math

import pytest
import torch
from torch.autograd.functional import hessian
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from federations import difference, randn
from pfedbayes.maths.laplace import (
    Spectrum,
    curvature,
    deviations,
    log_evidence,
    output_variances,
    precisions,
    probit,
    spectrum,
)
from pfedbayes.maths.trees import tree_map

STRUCTURES = ("diagonal", "kronecker", "full")
C, D, N = 3, 4, 20
PHI, W, Y = randn(N, D, seed=1), randn(C, D, seed=2), torch.arange(N) % C
P = (PHI @ W.T).softmax(-1)
HESSIANS = torch.diag_embed(P) - P[..., None] * P[..., None, :]
TAU = torch.tensor(0.7, dtype=torch.float64)


def exact():
    """The Hessian of the summed cross-entropy in W, by automatic differentiation, (C D, C D)."""
    return hessian(lambda w: cross_entropy(PHI @ w.view(C, D).T, Y, reduction="sum"), W.flatten())


def found(structure, phi=PHI, hessians=HESSIANS):
    return spectrum(structure, curvature(structure, phi, hessians), hessians.shape[-1])


def dense(spectrum_of):
    """The curvature as a matrix (C D, C D)."""
    values, vectors = spectrum_of
    if not vectors:
        return torch.diag(values.flatten())
    basis = vectors[0] if len(vectors) == 1 else torch.kron(*vectors)
    return basis @ torch.diag(values.flatten()) @ basis.T


def test_the_full_curvature_is_the_hessian_of_the_loss():
    assert difference(curvature("full", PHI, HESSIANS), exact()) < 1e-12
    assert difference(dense(found("full")), exact()) < 1e-10


def test_the_diagonal_is_that_of_the_hessian():
    assert difference(curvature("diagonal", PHI, HESSIANS).flatten(), exact().diagonal()) < 1e-12


def test_kronecker_factors_are_exact_for_one_example_equal_inputs_or_equal_hessians():
    same_phi, same_hessians = PHI[:1].expand(N, D), HESSIANS[:1].expand(N, C, C)
    for phi, hessians in ((PHI[:1], HESSIANS[:1]), (same_phi, HESSIANS), (PHI, same_hessians)):
        whole = curvature("full", phi, hessians)
        assert difference(dense(found("kronecker", phi, hessians)), whole) < 1e-10
    assert difference(dense(found("kronecker")), exact()) > 0.01  # in general they approximate


@pytest.mark.parametrize("structure", STRUCTURES)
def test_curvatures_of_parts_add_up(structure):
    one, other = (curvature(structure, PHI[part], HESSIANS[part]) for part in (slice(7), slice(7, N)))
    assert difference(tree_map(torch.add, one, other), curvature(structure, PHI, HESSIANS)) < 1e-12


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_have_the_inverse_curvature_as_covariance(structure):
    # The draws are linear in the noise, so unit vectors show the whole covariance.
    root = deviations(found(structure), TAU, torch.eye(C * D, dtype=torch.float64)).flatten(1)
    covariance = torch.linalg.inv(dense(found(structure)) + TAU * torch.eye(C * D, dtype=torch.float64))
    assert difference(root.T @ root, covariance) < 1e-10


@pytest.mark.parametrize("structure", STRUCTURES)
def test_output_variances_are_those_of_the_covariance(structure):
    covariance = torch.linalg.inv(dense(found(structure)) + TAU * torch.eye(C * D, dtype=torch.float64))
    for phi, variances in zip(PHI, output_variances(found(structure), TAU, PHI), strict=True):
        jacobian = torch.kron(torch.eye(C, dtype=torch.float64), phi[None])
        assert difference(variances, (jacobian @ covariance @ jacobian.T).diagonal()) < 1e-10


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_strong_prior_leaves_the_trained_weights(structure):
    noise = randn(5, C * D, seed=3)
    strong = deviations(found(structure), torch.tensor(1e20, dtype=torch.float64), noise)
    assert float(strong.abs().max()) < 1e-9
    variances = [output_variances(found(structure), tau, PHI) for tau in (TAU / 4, TAU, 4 * TAU)]
    assert bool((variances[0] > variances[1]).all())
    assert bool((variances[1] > variances[2]).all())


def test_in_linear_regression_the_full_approximation_is_the_exact_posterior():
    noise = 0.3
    hessians = torch.full((N, 1, 1), 1 / noise**2, dtype=torch.float64)
    root = deviations(found("full", PHI, hessians), TAU, torch.eye(D, dtype=torch.float64))[:, 0]
    assert (
        difference(root.T @ root, torch.linalg.inv(PHI.T @ PHI / noise**2 + TAU * torch.eye(D, dtype=torch.float64)))
        < 1e-10
    )


def test_the_evidence_of_linear_regression_is_exact_up_to_a_constant():
    noise, y = 0.3, randn(N, seed=5)
    hessians = torch.full((N, 1, 1), 1 / noise**2, dtype=torch.float64)
    fitted, eye = found("full", PHI, hessians), torch.eye(D, dtype=torch.float64)
    ours, theirs = [], []
    for k, tau in enumerate(precisions(PHI)):
        mode = torch.linalg.solve(PHI.T @ PHI / noise**2 + tau * eye, PHI.T @ y / noise**2)
        loss = 0.5 * (y - PHI @ mode).square().sum() / noise**2
        ours.append(log_evidence(fitted.values, mode[None])[k] - loss)
        covariance = noise**2 * torch.eye(N, dtype=torch.float64) + PHI @ PHI.T / tau
        normal = torch.distributions.MultivariateNormal(torch.zeros(N, dtype=torch.float64), covariance)
        theirs.append(normal.log_prob(y))
    gap = torch.stack(ours) - torch.stack(theirs)
    assert_close(gap, gap[:1].expand_as(gap), rtol=1e-6, atol=1e-6)


def test_equal_variances_keep_the_order_of_classes():
    logits = randn(9, C, seed=6)
    assert torch.equal(probit(logits, torch.full((9, C), 2.5, dtype=torch.float64)).argmax(-1), logits.argmax(-1))
    assert (
        difference(probit(logits, torch.full((9, C), 8 / math.pi, dtype=torch.float64)), logits / math.sqrt(2)) < 1e-12
    )


def test_the_mean_of_a_sigmoid_is_close_to_its_probit_approximation():
    logits = torch.tensor([[1.5, 0.0]], dtype=torch.float64)
    drawn = logits + torch.tensor([2.0, 0.0]) * randn(100_000, 2, seed=7)
    approximated = probit(logits[:, :1], torch.tensor([[4.0]])).sigmoid()
    assert float(approximated[0, 0]) == pytest.approx(float(drawn.softmax(-1)[:, 0].mean()), abs=0.02)


def test_eigenvalues_are_not_negative():
    assert all(float(found(structure).values.min()) >= 0 for structure in STRUCTURES)
    assert isinstance(found("full"), Spectrum)
