"""Predictions of the models of a federation, and their scores."""
