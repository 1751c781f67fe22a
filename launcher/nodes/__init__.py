"""Nodes: where commands run and files lie."""
