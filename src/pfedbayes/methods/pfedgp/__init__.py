"""pFedGP (Achituve et al. 2021): a Gaussian process per client on features that all clients share."""

from pfedbayes.methods.pfedgp.method import PFedGP

__all__ = ["PFedGP"]
