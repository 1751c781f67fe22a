"""Builders of argv: pure, no input or output."""
