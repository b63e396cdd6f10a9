"""FLamby's protocol for heart disease in four hospitals (Ogier du Terrail et al., 2022), and its published figures."""

from __future__ import annotations

import numpy as np
import pandas as pd
from sklearn.model_selection import train_test_split

from benchmarks.silos.tables import TEST, TRAIN, VALIDATION, Parts, Split, Table, make_split, read_frame

SEEDS = 5
TRAINING_SHARE = 0.66
VALIDATION_SHARE = 0.2  # of the training rows, for methods that stop early
DROPPED = ("slope", "ca", "thal")
RIVALS = ("local logistic regression", "pooled logistic regression")
HEART = {
    "pooled training": (73.5, 79.5),
    "FedAdagrad": (73.1, 77.9),
    "FedAvg": (68.5, 74.8),
    "each hospital alone": (73.0, None),
    "fine-tuning after FedAvg": (73.5, None),
}
"""Accuracy in %: mean over hospitals, and over all test rows."""


def split_heart(table: Table, seed: int) -> Split:
    """Keep the complete rows, split each hospital and standardise its numbers by its own training rows.

    Two thirds of a hospital's rows are training rows, stratified if both classes have more than two rows.
    """
    frame = read_frame(table).drop(columns=list(DROPPED)).dropna().reset_index(drop=True)
    parts = np.full(len(frame), TEST, dtype="<U10")
    for hospital in sorted(frame[table.client].unique()):
        rows = np.flatnonzero((frame[table.client] == hospital).to_numpy())
        labels = frame[table.target].to_numpy()[rows]
        train = _some(rows, labels, TRAINING_SHARE, seed)
        parts[train] = TRAIN
        held = _some(train, frame[table.target].to_numpy()[train], VALIDATION_SHARE, seed)
        parts[held] = VALIDATION
    frame = standardised(frame, table.client, parts)
    return make_split(table.name, frame, table.target, table.client, "classification", parts)


def _some(rows: np.ndarray, labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    counts = np.unique(labels, return_counts=True)[1]
    stratify = labels if len(counts) == 2 and counts.min() > 2 else None
    taken: np.ndarray = train_test_split(rows, train_size=share, random_state=seed, stratify=stratify)[0]
    return taken


def standardised(frame: pd.DataFrame, client: str, parts: Parts) -> pd.DataFrame:
    """Standardise the numbers of each client by its training rows."""
    frame = frame.copy()
    names = [name for name in frame if pd.api.types.is_numeric_dtype(frame[name])]
    frame[names] = frame[names].astype(float)
    for one in frame[client].unique():
        own = (frame[client] == one).to_numpy()
        train = frame.loc[own & (parts != TEST), names]
        deviation = train.std(ddof=0).where(lambda values: values > 0, 1.0)
        frame.loc[own, names] = (frame.loc[own, names] - train.mean()) / deviation
    return frame
