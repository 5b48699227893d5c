"""Published measurements as rows, and what the cost model predicts for each."""
