"""`python -m benchmarks`: compare the speed of the package with other implementations of the same work."""
