"""scikit-learn's own checks of estimators. All rows are one group in them."""

import warnings

import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator

from pfedbayes.sklearn import PersonalizedClassifier, PersonalizedRegressor

# May fail: networks compute in single precision, so a prediction depends on its neighbours in the 7th digit.
ROUNDING = {"check_methods_sample_order_invariance", "check_methods_subset_invariance"}
CHEAP = {"evaluation.folds": 2, "evaluation.alone": False}
QUICK = {"rounds": 1, "settings": CHEAP | {"training.local_steps": 1}}
FEW_ROUNDS = {"rounds": 5, "settings": CHEAP}  # enough for the scores that the checks ask for
# Those that find most mistakes in a few fits; the others are slow.
FAST = {
    "check_estimator_cloneable", "check_estimator_repr", "check_no_attributes_set_in_init", "check_estimators_unfitted",
    "check_do_not_raise_errors_in_init_or_set_params", "check_mixin_order", "check_dont_overwrite_attributes",
    "check_complex_data", "check_estimators_empty_data_messages", "check_estimator_sparse_array",
    "check_classifiers_one_label", "check_parameters_default_constructible", "check_get_params_invariance",
    "check_set_params", "check_fit2d_1sample", "check_fit1d", "check_requires_y_none", "check_n_features_in",
    "check_dict_unchanged",
}  # fmt: skip


def name_of(check):
    while hasattr(check, "func"):
        check = check.func
    return check.__name__


def checks(**params):
    """Return the checks of both estimators."""
    found = []
    for cls in (PersonalizedClassifier, PersonalizedRegressor):
        for estimator, check in estimator_checks_generator(cls(**params)):
            name = name_of(check)
            marks = [pytest.mark.xfail(raises=AssertionError, strict=False)] if name in ROUNDING else []
            found.append(pytest.param(estimator, check, id=f"{cls.__name__}-{name}-{len(found)}", marks=marks))
    return found


def run(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


@pytest.mark.parametrize(("estimator", "check"), [one for one in checks(**QUICK) if one.id.split("-")[1] in FAST])
def test_fast_checks_of_scikit_learn(estimator, check):
    run(estimator, check)


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "check"), checks(**FEW_ROUNDS))
def test_all_checks_of_scikit_learn(estimator, check):
    run(estimator, check)
