"""States that are served: an engine that runs many sequences at once, and a store that keeps where each of them stands.

Reading and writing give the same bits (`FusedStep.prefill` is to the last bit what steps give), and a row's bits don't depend on
its neighbours. So neither load nor batching, cache hits, parking or restarts change an answer.
"""
