"""The correctness gate: shows on a user's own machine whether a copy path is ordered."""
