"""Where the clients' states rest between rounds: on the device, in the host's memory, or in a file."""

from pfedbayes.engine.population.base import HOST, Population
from pfedbayes.engine.population.choose import Resting, choose_resting, make_population
from pfedbayes.engine.population.device import DevicePopulation
from pfedbayes.engine.population.file import FilePopulation
from pfedbayes.engine.population.host import HostPopulation

__all__ = [
    "HOST", "DevicePopulation", "FilePopulation", "HostPopulation", "Population", "Resting", "choose_resting",
    "make_population",
]  # fmt: skip
