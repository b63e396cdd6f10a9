"""Bad inputs, generated from seeds, for everything that reads something: see `python -m tests.fuzz --help`."""
