"""`python -m benchmarks`: how fast the package is beside other ways to do the same work, measured in one run."""
