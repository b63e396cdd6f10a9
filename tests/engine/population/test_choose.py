"""Where clients' states rest."""

from pfedbayes.engine.population import HOST, choose_resting
from pfedbayes.engine.population import choose as choose_module


def test_clients_rest_where_they_fit(monkeypatch):
    monkeypatch.setattr(choose_module, "host_memory", lambda: 16_000)
    assert choose_resting(100, 10, 1, 1, HOST) == "device"
    assert choose_resting(100, 49, 1, 1, HOST) == "host"
    assert choose_resting(100, 50, 1, 1, HOST) == "file"
    assert choose_resting(100, 49, 2, 1, HOST) == "file"  # a round needs memory too
    assert choose_resting(100, 16, 1, 3, HOST) == "host"
    assert choose_resting(100, 17, 1, 3, HOST) == "file"
    assert choose_resting(100, 1000, 1000, 1, HOST) == "device"  # all train each round anyway
