import warnings

with warnings.catch_warnings(action="ignore"):  # of the libraries of Flower, about each other
    import flwr.clientapp
    import flwr.serverapp  # noqa: F401
