"""The checks that need a GPU, and what brings them to a host that reaches no registry."""
