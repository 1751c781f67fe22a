"""Engram: the n-gram tables' layout, where they lie, how rows are read, and references."""
