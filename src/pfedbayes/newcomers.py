"""A client that was never in the run: its own model, from the shared one, in seconds."""
