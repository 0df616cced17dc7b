"""Scans: recurrences of numbers, not of matrices. The functions, one step of each, their state."""
