"""What the models of a federation predict, and how good the predictions are."""
