"""Softmax attention, the baseline, and its cache."""
