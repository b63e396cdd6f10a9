"""A court for Bayesian methods: small models whose posterior is known judge what each method claims."""
