"""Evaluators: they take a model and an iterable of batches, and import no data."""
