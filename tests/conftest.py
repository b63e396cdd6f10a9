import pytest
import torch

from federations import make_model, make_shards


@pytest.fixture(autouse=True)
def same_number_of_threads():
    """Plans set torch's number of threads for the whole process; the next test shall not notice."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shards():
    return make_shards()


@pytest.fixture
def model():
    return make_model()
