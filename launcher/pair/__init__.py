"""Two Sparks: what is deployed on them, how they are looked at, and how the ranks are reached."""
