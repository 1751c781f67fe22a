"""The model's files: which they are, whether they are whole, and how each node gets them."""
