"""Will it fit: memory of the pair and of other machines, from headers and settings. Pure but for
``source``, which reads the checkpoint's headers."""
