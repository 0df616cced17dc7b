"""The delta rule: the function, one step of it, the record of its call, its state."""
