"""Softmax attention to a window and to sinks, and features of all other keys."""
