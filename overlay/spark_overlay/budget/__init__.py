"""How much memory a rank needs, from headers and config alone. No torch, no numpy."""
