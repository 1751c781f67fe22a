"""The settings themselves, one module for each group of the table."""
