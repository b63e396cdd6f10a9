"""Mixed-effects models of statsmodels: fixed effects, and per client a random intercept and perhaps random slopes.

Random effects are independent, with one variance per column.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg import qr
from scipy.special import expit
from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM
from statsmodels.regression.mixed_linear_model import MixedLM, MixedLMParams

from benchmarks.silos.encoding import Design
from benchmarks.silos.scores import Floats, NotFitted


def fixed_effects(design: Design) -> Floats:
    """Return an intercept and those inputs that do not depend linearly on earlier ones in the training rows (n, p)."""
    x = np.concatenate([np.ones((len(design.y), 1)), design.x], axis=1)
    kept: list[int] = []
    upper = np.abs(np.diagonal(qr(x[design.train], mode="r")[0]))
    if (upper > 1e-8 * upper.max()).all():
        return x
    for column in range(x.shape[1]):
        if np.linalg.matrix_rank(x[design.train][:, [*kept, column]]) > len(kept):
            kept.append(column)
    chosen: Floats = x[:, kept]
    return chosen


def mixed_linear(design: Design, slopes: bool) -> tuple[Floats, Floats]:
    """Fit a linear mixed model by REML; return means and variances of the test rows (m,).

    slopes: whether clients have random slopes besides a random intercept.
    """
    x, train = fixed_effects(design), design.train
    z = x if slopes else x[:, :1]
    free = MixedLMParams.from_components(fe_params=np.ones(x.shape[1]), cov_re=np.eye(z.shape[1]))
    model = MixedLM(design.y[train], x[train], design.client[train], exog_re=z[train])
    try:
        fitted = model.fit(free=free)
    except (np.linalg.LinAlgError, ValueError) as error:
        raise NotFitted(f"MixedLM failed: {error}") from None
    if not fitted.converged:
        raise NotFitted("MixedLM did not converge")
    effects, spread, noise = np.asarray(fitted.fe_params), np.diag(np.asarray(fitted.cov_re)), float(fitted.scale)
    residual = design.y - x @ effects
    mean, variance = x @ effects, np.zeros(len(x))
    for client in range(design.num_clients):
        own = design.client == client
        about, cov = random_effects(z[own & train], residual[own & train], np.diag(spread), noise)
        mean[own] += z[own] @ about
        variance[own] = noise + np.einsum("ij,jk,ik->i", z[own], cov, z[own])
    return mean[design.test], variance[design.test]


def random_effects(z: Floats, residual: Floats, prior: Floats, noise: float) -> tuple[Floats, Floats]:
    """Return mean (q,) and covariance (q, q) of u given residual = z u + e, with u ~ N(0, prior), e ~ N(0, noise I)."""
    gain = prior @ z.T @ np.linalg.inv(z @ prior @ z.T + noise * np.eye(len(z)))
    return gain @ residual, prior - gain @ z @ prior


def mixed_logistic(design: Design, slopes: bool) -> Floats:
    """Fit a logistic mixed model by mean-field variational Bayes; return class probabilities of the test rows (m, 2).

    The logit is integrated over its Gaussian posterior approximately (MacKay 1992).
    """
    if design.num_classes != 2:
        raise NotFitted("statsmodels has mixed models for two classes only")
    x, train = fixed_effects(design), design.train
    z, kinds = random_design(x if slopes else x[:, :1], design.client, design.num_clients)
    model = BinomialBayesMixedGLM(design.y[train].astype(float), x[train], z[train], kinds)
    size = x.shape[1] + kinds.max() + 1 + z.shape[1]
    fitted = model.fit_vb(np.zeros(size), np.full(size, 0.5))
    if not fitted.optim_retvals.success or not np.isfinite(fitted.params).all():
        raise NotFitted("BinomialBayesMixedGLM did not converge")
    xt, zt = x[design.test], z[design.test]
    logit = xt @ fitted.fe_mean + zt @ fitted.vc_mean
    variance = xt**2 @ fitted.fe_sd**2 + zt.power(2) @ fitted.vc_sd**2
    p = expit(logit / np.sqrt(1 + np.pi * variance / 8))
    return np.stack([1 - p, p], axis=1)


def random_design(
    columns: Floats, client: NDArray[np.int64], clients: int
) -> tuple[sparse.csr_matrix, NDArray[np.int64]]:
    """Return the design (n, q N) of random effects of q columns for N clients, and the column of each effect (q N,)."""
    n, q = columns.shape
    rows = np.repeat(np.arange(n), q)
    places = np.arange(q) * clients + client[:, None]
    z = sparse.csr_matrix((columns.ravel(), (rows, places.ravel())), shape=(n, q * clients))
    return z, np.repeat(np.arange(q), clients)
