"""The mathematics: Gaussians, optimisers, likelihoods, scores, confidence bounds, trees of tensors and named draws."""
