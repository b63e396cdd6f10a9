"""The reproduction of the paper: theory, tables and figures. Nothing else in the package imports it."""
