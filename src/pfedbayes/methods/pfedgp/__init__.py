"""pFedGP (Achituve et al. 2021): per client, Gaussian processes on features that all clients share."""

from pfedbayes.methods.pfedgp.method import PFedGP

__all__ = ["PFedGP"]
