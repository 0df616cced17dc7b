"""The delta rule: a state that is corrected, not only added to."""
