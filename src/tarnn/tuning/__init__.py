"""Tune a model that opens on data of one's own: adapters, all weights, or the states before the first token."""
