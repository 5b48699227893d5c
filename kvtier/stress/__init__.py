"""Load on an emulated card: a model's geometry, contexts and sessions through the real store."""
