"""Reads a rank's share of a checkpoint, and no more, at the speed of the drive."""
