"""Facts of a node: what is asked, and how the answer is read. Pure.

A fact has a constant argv and parses what that printed; nothing typed by a user is in it.
"""
