"""Pairs of texts: from one to the other, by an encoder–decoder."""
