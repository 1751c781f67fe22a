"""The served API as its clients see it: one pair of ranks for all tests of this folder."""
