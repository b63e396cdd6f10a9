"""How fast does the error of trained personal posteriors fall with n? Measured on functions of known smoothness."""
