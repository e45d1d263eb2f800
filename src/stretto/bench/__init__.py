"""How fast are the collectives here? `stretto bench`: see `command` for what it offers and `measure` for how it measures."""
