"""The section [data] of an experiment."""

from typing import Any

import pytest

from pfedbayes.data import DataConfig
from pfedbayes.data.config import PROTOCOLS, Name


class TestConfig:
    def test_defaults_are_the_papers(self) -> None:
        config = DataConfig()
        assert (config.name, config.size, config.num_clients, config.per_label) == (
            "mnist",
            "small",
            10,
            (50, 950, 1200),
        )
        clients: dict[Name, int] = {"mnist": 10, "fashion-mnist": 10, "cifar10": 20}
        assert {name: DataConfig(name=name).num_clients for name in PROTOCOLS} == clients

    def test_explicit_counts_replace_the_size(self) -> None:
        assert DataConfig(train_per_label=3, test_per_label=4).per_label == (3, 4, 7)
        assert DataConfig(examples=50, test_fraction=0.3).per_label == (7, 3, 10)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"name": "imagenet"}, "name must be one of \"mnist\".*got 'imagenet'"),
            ({"size": "huge"}, "size must be one of \"small\".*got 'huge'"),
            ({"labels": "sorted"}, "labels must be one of"),
            ({"split": "half"}, "split must be one of"),
            ({"clients": 0}, "clients must be between 1 and 1000000, got 0"),
            ({"labels_per_client": 0}, "labels_per_client must be between 1 and 1000000, got 0"),
            ({"examples": 1}, "examples must be at least 2, got 1"),
            ({"features": 0}, "features must be at least 1, got 0"),
            ({"classes": 1}, "classes must be between 2 and 1000000, got 1"),
            ({"seed": -1}, "seed must be between 0 and .*, got -1"),
            ({"alpha": 0.0}, "alpha must be between 0 and inf, got 0.0"),
            ({"alpha": float("nan")}, "alpha must be between 0 and inf, got nan"),
            ({"noise": -0.1}, "noise must be at least 0 and less than inf, got -0.1"),
            ({"validation": -0.1}, "validation must be at least 0 and less than 1, got -0.1"),
            ({"validation": 1.0}, "validation must be at least 0 and less than 1, got 1.0"),
            ({"test_fraction": 1.0}, "test_fraction must be at least 0 and less than 1, got 1.0"),
            ({"train_per_label": 5}, "belong together"),
            ({"train_per_label": 0, "test_per_label": 5}, "train_per_label must be at least 1, got 0"),
            ({"train_per_label": 5, "test_per_label": 5, "examples": 9}, "give one of them"),
            ({"labels": "iid", "train_per_label": 5, "test_per_label": 5}, "give examples and test_fraction"),
            ({"labels": "dirichlet", "split": "shuffle"}, "does not go with"),
            ({"labels": "iid", "split": "overlap"}, 'does not go with split = "overlap"'),
            ({"split": "overlap", "validation": 0.2}, "train on the held-out data of others"),
            ({"split": "overlap", "certify": 0.2}, "train on the held-out data of others"),
            ({"name": "regression", "split": "shuffle"}, "has no labels for split"),
            ({"size": None}, "the number of images is not set"),
            ({"name": "files", "path": "a.csv", "pieces": 1}, "pieces = 1 is a straight line.*give 0 or at least 2"),
            ({"name": "files", "path": "a.csv", "pieces": -1}, "pieces must be between 0 and 32, got -1"),
            ({"name": "files", "path": "a.csv", "pieces": 33}, "pieces must be between 0 and 32, got 33"),
            ({"pieces": 0}, "pieces applies only to your own files"),
            ({"examples": 4}, "leaves no training example"),
        ],
    )
    def test_bad_values(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message) as error:
            DataConfig(**fields)
        assert "\n" not in str(error.value)
