"""The module of smp that has checkpoint(), under its name there."""
