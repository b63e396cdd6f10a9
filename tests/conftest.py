import pytest
import torch


@pytest.fixture(autouse=True)
def same_number_of_threads():
    """Plans set torch's number of threads for the whole process; the next test shall not notice."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
