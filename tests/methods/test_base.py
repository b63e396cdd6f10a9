import dataclasses
import inspect
import re

import pytest

from federations import randn
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.errors import UserError
from pfedbayes.methods import METHODS, BNFed, FedAvg, FedPer
from pfedbayes.methods.base import About, Habits, Method, Needs, adapts, weights_posterior

# What a method says of itself that is not said of every method.
DECLARED = {
    "pfedbayes": {"personal": True, "stochastic": True, "gaussian": True, "init": "normal", "trains": "all"},
    "hierarchical": {
        "personal": True,
        "stochastic": True,
        "gaussian": True,
        "averages": False,
        "mean_only": True,
        "full_batch": True,
        "mapped": False,
        "shuffled": False,
    },
    "pvi": {"stochastic": True, "gaussian": True, "averages": False, "tied": True},
    "fedep": {"stochastic": True, "gaussian": True, "averages": False, "tied": True},
    "fedsep": {"stochastic": True, "gaussian": True, "averages": False},
    "fedivon": {"stochastic": True, "gaussian": True, "averages": False, "personal": True},
    "pfedvem": {"stochastic": True, "gaussian": True, "averages": False, "personal": True, "trains": "all"},
    "fedpa": {"max_steps": 20},
    "fola": {"stochastic": True, "gaussian": True, "averages": False},
    "fedbe": {"stochastic": True, "gaussian": True, "averages": False},
    "fedpop": {"personal": True, "stochastic": True, "averages": False},
    "fedavg": {},
    "fedprox": {},
    "bnfed": {
        "averages": False,
        "all_clients": True,
        "eager": True,
        "net": "mlp",
        "init": "normal",
        "pixels": "unit",
        "trains": "all",
    },
    "perfedavg": {"personal": True, "shared": False, "batches_per_step": 2},
    "pfedme": {"personal": True, "trains": "all"},
    "heurfedamp": {"personal": True, "shared": False, "averages": False, "trains": "all"},
    "pfedgp": {
        "personal": True,
        "shared": False,
        "full_batch": True,
        "at_once": 5,
        "labels": True,
        "keeps_examples": True,
        "eager": True,
        "full_precision": True,
        "outputs": 84,
        "max_steps": 1,
    },
    "local": {"personal": True, "shared": False, "averages": False, "trains": "all"},
    "pooled": {"pooled_data": True},
    "fedavg-ft": {"personal": True},
    "ditto": {"personal": True},
    "fedper": {"personal": True, "shared": False},
    "fedrep": {"personal": True, "shared": False},
    "scaffold": {"averages": False, "mean_only": True, "tied": True},
    "apfl": {"personal": True},
    "fedbabu": {"personal": True},
    "fedrod": {"personal": True, "labels": True},
    "knnper": {"personal": True, "labels": True, "keeps_examples": True},
    "fedala": {"personal": True},
}
TILTED = {
    "projection": "laplace", "scale": 1.0, "curvature": 1.0, "damping": None, "prior_mean": 0.0, "prior_sigma": 1.0,
}  # fmt: skip
# Default hyper-parameters: those of the papers, or of the authors' code.
DEFAULTS = {
    "pfedbayes": {
        "zeta": 10.0,
        "rho0": -2.5,
        "eta_personal": 0.001,
        "eta_global": 0.001,
        "samples": 1,
        "beta": 1.0,
        "server": "average",
        "hyper_weight": 4.0,
        "hyper_sigma": None,
        "noise_std": 1.0,
        "personal_steps": 1,
        "reset_personal": False,
        "prior": "moving",
        "optimizer": "adam",
        "scale": "data",
        "eta_data": 0.0,
        "sigma_by_size": 0.0,
    },
    "hierarchical": {
        "eta_mean": 0.05,
        "eta_rho": 0.05,
        "anneal": None,
        "spread": 0.3,
        "confidence": 4.0,
        "wait": 0.25,
        "full_batch": True,
        "kl_shared": 1.0,
        "kl_personal": 1.0,
    },
    "pvi": {
        "eta": 0.001,
        "samples": 1,
        "damping": None,
        "prior_mean": 0.0,
        "prior_sigma": 1.0,
        "rho0": -2.5,
        "zeta": 1.0,
        "valid_factors": False,
    },
    "fedep": {"eta": 0.01, "momentum": 0.9, **TILTED},
    "fedsep": {"eta": 0.01, "momentum": 0.9, **TILTED},
    "fedivon": {
        "eta": 0.1,
        "samples": 1,
        "beta1": 0.9,
        "beta2": 0.999,
        "hessian": 0.5,
        "delta": 2e-4,
        "personal_prior": False,
        "zeta": 1.0,
        "weights": "precision",
        "server_ess": "total",
    },
    "pfedvem": {
        "eta": 0.01,
        "eta_head": 0.01,
        "momentum": 0.9,
        "samples": 5,
        "head_steps": 1,
        "body_steps": 1,
        "zeta": 1.0,
        "rho0": 0.5413,
        "beta": 0.0,
    },
    "fedpa": {"eta": 0.01, "burn_in": 10, "samples": 5, "sample_steps": 2, "shrinkage": 0.01, "warm_rounds": 0},
    "fola": {"eta": 0.01, "prior_weight": 0.1, "accumulate": False, "floor": 1e-8, "prior_sigma": 1.0},
    "fedbe": {"eta": 0.01, "teacher": "gaussian", "scale": 1.0},
    "fedpop": {
        "eta": 0.01,
        "eta_head": 0.01,
        "noise_std": 1.0,
        "burn_in": 5,
        "samples": 10,
        "sigma0": 0.1,
        "learn_spread": True,
    },
    "fedavg": {"eta": 0.01},
    "fedprox": {"eta": 0.01, "prox": 0.001, "anchor": "received"},
    "bnfed": {
        "eta": 0.5,
        "sigma2": 1.0,
        "sigma02": 1.0,
        "gamma": 1.0,
        "sweeps": 3,
        "bias": 0.1,
        "class_shares": True,
        "popularity": 2.0,
        "novelty": 2.0,
        "max_count": None,
        "max_width": None,
    },
    "perfedavg": {"eta_outer": 0.01, "alpha": 0.01, "variant": "first-order", "delta": 0.001, "adapt_on": "train"},
    "pfedme": {"eta_personal": 0.01, "eta": 0.01, "prox": 15.0, "inner_steps": 5, "weight_decay": 0.001, "beta": 1.0},
    "heurfedamp": {
        "eta": 0.01,
        "self_weight": 0.5,
        "sharpness": 25.0,
        "prox": 1.0,
        "alpha": 10000.0,
        "attention": "cosine",
        "width": 25.0,
    },
    "pfedgp": {
        "eta": 0.05,
        "momentum": 0.9,
        "weight_decay": 0.001,
        "clip": 50.0,
        "inner_steps": 1,
        "features": 84,
        "outputscale": 8.0,
        "lengthscale": 1.0,
        "jitter": 0.001,
        "gibbs_steps": 5,
        "chains": 20,
        "test_chains": 30,
        "target_share": 0.5,
        "link": "mean",
    },
    "local": {"eta": 0.01},
    "pooled": {"eta": 0.01},
    "fedavg-ft": {"eta": 0.01, "eta_personal": 0.01, "steps": 20},
    "ditto": {"eta": 0.01, "eta_personal": 0.01, "prox": 1.0},
    "fedper": {"eta": 0.01},
    "fedrep": {"eta": 0.01, "head_steps": 1, "body_steps": 1},
    "scaffold": {"eta": 0.01, "eta_global": 1.0},
    "apfl": {"eta": 0.01, "eta_personal": 0.01, "alpha": 0.5, "eta_alpha": 0.01, "mix": "parameters"},
    "fedbabu": {"eta": 0.01, "eta_personal": 0.01, "tune_steps": 20, "tune": "all"},
    "fedrod": {"eta": 0.01, "eta_personal": 0.01, "start": "zero"},
    "knnper": {"eta": 0.01, "neighbours": 10, "scale": 1.0, "mix": None},
    "fedala": {"eta": 0.01, "eta_mixing": 1.0, "mix_steps": 2},
}


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_declares(name):
    method = METHODS[name]()
    found = {**method.about._asdict(), **method.needs._asdict(), **method.habits._asdict()}
    usual = {**About("", "", "")._asdict(), **Needs()._asdict(), **Habits()._asdict()}
    texts = ("title", "reference", "learns")
    assert {field: value for field, value in found.items() if value != usual[field] and field not in texts} == DECLARED[
        name
    ]
    assert dataclasses.asdict(method) == DEFAULTS[name]
    assert name.split("-")[0] in method.about.title.lower().replace("-", "")
    assert re.search(r"\d{4}|baseline", method.about.reference)


def test_what_is_said_of_every_method():
    assert About("a", "b", "c") == ("a", "b", "c", False, True, False, False, True, False)
    assert Needs() == (False,) * 9 + (None, None, 1, None, True, True, None)
    assert Habits() == ("torch", "signed", "chosen")


def test_no_more_steps_are_asked_for_than_the_method_takes():
    class Two(FedAvg):
        needs = Needs(max_steps=2)

        def step(self, model, local, batches, noise):
            return local

    steps = iter([(batches, randn(0)) for batches in [()] * 5])
    client_round(Two(), None, (), randn(3), None, steps)
    assert len(list(steps)) == 3


def test_an_author_meets_at_most_18_names():
    names = {name for name in (*vars(Method), *inspect.get_annotations(Method)) if not name.startswith("_")}
    assert len(names) <= 18


def test_a_method_adapts_if_it_overrides_adapt():
    assert not adapts(FedAvg())
    assert adapts(FedPer())


@pytest.mark.parametrize("name", METHODS)
def test_every_field_and_every_class_is_documented(name):
    method = METHODS[name]
    source = inspect.getsource(method)
    assert not method.__doc__.startswith(f"{method.__name__}(")  # what dataclasses write if there is none
    for field in inspect.get_annotations(method):
        assert f"\n    {field}: " in source
        _, _, after = source.partition(f"\n    {field}: ")
        assert after.splitlines()[1].lstrip().startswith('"""'), f"{name}.{field} has no docstring"


def test_a_model_that_is_more_than_its_weights_has_no_posterior():
    with pytest.raises(UserError, match="BNFed has no distribution over weights: use"):
        weights_posterior(BNFed(), None)


def test_hyper_parameters_without_sense_are_refused():
    with pytest.raises(ValueError, match="eta must not be negative"):
        FedAvg(eta=-1.0)
