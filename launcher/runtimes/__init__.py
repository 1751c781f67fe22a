"""Runtimes: what keeps a rank alive on a node and can say how it ended."""
