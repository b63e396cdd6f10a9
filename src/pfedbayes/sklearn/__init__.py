"""Estimators of scikit-learn for grouped tables.

model = PersonalizedClassifier().fit(X, y, groups=hospitals)
model.predict_proba(X_new, groups=new_hospitals)
"""

try:
    import sklearn as _  # noqa: F401
except ImportError:
    raise ImportError("pfedbayes.sklearn needs scikit-learn: pip install 'pfedbayes[sklearn]'") from None

from pfedbayes.sklearn.estimators import PersonalizedClassifier, PersonalizedRegressor

__all__ = ["PersonalizedClassifier", "PersonalizedRegressor"]
